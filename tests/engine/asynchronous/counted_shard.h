#pragma once

#include <absl/status/status.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/server_courier.h"
#include "engine/asynchronous/servers/server_link.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "runtime/border/throw.h"
#include "tests/engine/asynchronous/served_runs.h"

namespace tessera::testing::servers_test {

/// One shard with the rule sgd at a server: a push of ones subtracts 1 from its values. So its values show how many
/// pushes were applied.
class CountedShard {
 public:
  static constexpr std::int64_t kElements = 256;

  /// `limit` is the time that an answer may take.
  explicit CountedShard(const std::string& address, std::chrono::milliseconds limit = std::chrono::seconds(60))
      : strategy_(served([](Strategy& s) {
          s.optimizer = {.type = OptimizerType::kSgd, .lr = 1, .weight_decay = 0, .momentum = 0};
        })),
        gradients_(kElements, 1.0F),
        values_(kElements),
        courier_({.address = address,
                  .name = "server 0",
                  .secret = kSecret,
                  .definition = std::string(32, 'r') + definition().dump(),
                  .shards = 1,
                  .life = 7,
                  .limit = limit}) {}

  absl::Status join() {
    const auto deadline = ServerLink::Clock::now() + std::chrono::seconds(30);
    return courier_.start(deadline, deadline).status();
  }
  /// Sets the shard's values at the server to zeros.
  absl::Status write() {
    ServerQuestion question;
    question.head.kind = MessageKind::kWrite;
    question.head.second = kElements;
    question.rest.push_back(std::as_bytes(std::span(values_)));
    return wait(courier_.send(std::move(question)));
  }
  ServerCourier::Ticket push(bool is_early = false) {
    if (is_early) {
      ServerQuestion gradients;
      gradients.head.kind = MessageKind::kStage;
      gradients.rest.push_back(std::as_bytes(std::span(gradients_)));
      courier_.send(std::move(gradients));
    }
    const LearningRates rates(strategy_.optimizer);
    const UpdateOptions options(strategy_.optimizer);
    const PushedNumbers numbers{1, 0, 1, 0};
    const std::array<char, 1> used{1};
    ServerQuestion question;
    question.head.kind = is_early ? MessageKind::kApply : MessageKind::kPush;
    question.head.second = ++step_;
    for (const auto& part : {bytes_of(numbers), std::as_bytes(rates.all()), std::as_bytes(options.all()),
                             std::span<const std::byte>(std::as_bytes(std::span(used)))})
      question.front.insert(question.front.end(), part.begin(), part.end());
    if (!is_early) question.rest.push_back(std::as_bytes(std::span(gradients_)));
    return courier_.send(std::move(question));
  }
  absl::Status wait(const ServerCourier::Ticket& ticket) {
    courier_.wait(ticket);
    return ticket->status;
  }
  /// Returns the number of pushes that each element has; -1 if the elements differ. REQUIRES: no push is under way.
  std::int64_t pushes() {
    courier_.forget_staged();
    ServerQuestion question;
    question.head.kind = MessageKind::kCopy;
    question.answer.push_back(std::as_writable_bytes(std::span(values_)));
    throw_if_error(wait(courier_.send(std::move(question))));
    const bool are_alike = std::ranges::all_of(values_, [&](float each) { return each == values_[0]; });
    return are_alike ? static_cast<std::int64_t>(-values_[0]) : -1;
  }
  std::int64_t lost() const { return courier_.lost_pushes(); }

 private:
  nlohmann::json definition() const {
    const nlohmann::json group = {{"unit", "a unit"}, {"unit_index", 0},
                                  {"group", 0},       {"numels", nlohmann::json::array({kElements})},
                                  {"parts", 1},       {"options", nlohmann::json::array({-1})}};
    return {{"ranks", 1},
            {"server", 0},
            {"servers", 1},
            {"timeout_s", 30.0},
            {"strategy", strategy_.to_json()},
            {"groups", nlohmann::json::array({group})}};
  }

  const Strategy strategy_;
  const std::vector<float> gradients_;
  std::vector<float> values_;
  std::int64_t step_ = 0;
  ServerCourier courier_;
};

}  // namespace tessera::testing::servers_test
