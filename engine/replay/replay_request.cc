#include "engine/replay/replay_request.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/replay/step_records.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

constexpr const char* kVariable = "TESSERA_REPLAY";
const std::vector<std::string> kFinds = {"nothing", "nonfinite", "divergence"};
const std::vector<std::string> kKeys = {"step", "hashes", "microbatches", "find"};

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ExitCode::kConfig, std::string(kVariable) + ": " + what);
}

/// Returns the member `key`, which is a count, or `otherwise` if there is no such member.
std::int64_t count_of(const nlohmann::json& request, const char* key, std::int64_t otherwise) {
  const auto member = request.find(key);
  if (member == request.end()) return otherwise;
  if (!member->is_number_integer() || member->get<std::int64_t>() < 1)
    refuse(std::string("\"") + key + "\" is " + member->dump() +
           ", and wanted is an integer from 1 on. [T0877] hint: write a whole number above 0, without quotes");
  return member->get<std::int64_t>();
}

std::string text_of(const nlohmann::json& request, const char* key, const char* otherwise) {
  const auto member = request.find(key);
  if (member == request.end()) return otherwise;
  if (!member->is_string())
    refuse(std::string("\"") + key + "\" is " + member->dump() +
           ", and wanted is a text. [T0878] hint: put it in quotes");
  return member->get<std::string>();
}

ReplayRequest parse(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    refuse("wanted a JSON object, got " + quoted_text(text) +
           ". [T0879] hint: write '{\"step\": 120, \"hashes\": \"hashes.jsonl\", \"find\": \"nonfinite\"}'");
  for (const auto& member : json.items()) {
    if (std::ranges::find(kKeys, member.key()) == kKeys.end())
      refuse("unknown key " + quoted_text(member.key()) +
             ". [T0880] hint: known are step, hashes, microbatches and find");
  }
  ReplayRequest request;
  request.step = count_of(json, "step", 0);
  if (request.step == 0)
    refuse("\"step\" is missing. [T0881] hint: it is the last step that is made again and looked at");
  request.hashes = text_of(json, "hashes", "");
  request.microbatches = count_of(json, "microbatches", 0);
  const std::string find = text_of(json, "find", "nothing");
  const auto found = std::ranges::find(kFinds, find);
  if (found == kFinds.end())
    refuse("\"find\" is " + quoted_text(find) + ". [T0882] hint: it is \"nonfinite\" or \"divergence\"");
  request.find = static_cast<ReplayRequest::Find>(found - kFinds.begin());
  if (request.find == ReplayRequest::Find::kDivergence && request.hashes.empty())
    refuse(
        "\"find\" divergence has nothing to compare with. [T0883] hint: name the file that record_hashes wrote: "
        "\"hashes\"");
  return request;
}

std::int64_t microbatches_of(const ReplayRequest& request) {
  if (request.microbatches > 0) return request.microbatches;
  if (request.hashes.empty())
    refuse(
        "nothing says how many microbatches a step has over all ranks. [T0884] hint: give \"hashes\", a file that "
        "record_hashes wrote, or \"microbatches\"");
  const std::vector<StepRecord> records = value_or_throw(read_step_records(request.hashes, kVariable));
  if (records.empty())
    refuse(request.hashes +
           " has no step, so nothing says how many microbatches one has. [T0885] hint: give \"microbatches\"");
  const auto next = std::ranges::lower_bound(records, request.step, {}, &StepRecord::step);
  return next == records.end() ? records.back().microbatches : next->microbatches;
}

}  // namespace

std::optional<ReplayRequest> ReplayRequest::from_environment() {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return parse(text);
}

std::string ReplayRequest::to_json() const {
  nlohmann::ordered_json json = {{"step", step}, {"find", kFinds[static_cast<std::size_t>(find)]}};
  if (!hashes.empty()) json["hashes"] = hashes;
  if (microbatches > 0) json["microbatches"] = microbatches;
  return json.dump();
}

void expect_no_replay() {
  if (!ReplayRequest::from_environment()) return;
  refuse(
      "hashes of steps are made on the CPU, so steps are made again there, and a GPU trains. [T1025] hint: take "
      "comm.transport \"host\" or \"gloo\", or unset the variable");
}

Strategy as_replayed(Strategy strategy, int ranks) {
  const std::optional<ReplayRequest> request = ReplayRequest::from_environment();
  if (!request) return strategy;
  if (!strategy.reproducible)
    refuse(
        "a step can be made again where the strategy has \"reproducible\": true, which this one has not. [T0886] hint: "
        "unset the variable, or record a run with that key");
  if (strategy.durable.every > 0)
    refuse(
        "a replay commits nothing, and the strategy has \"durable\". [T0887] hint: leave that key out, and load a "
        "checkpoint");
  const std::int64_t all = microbatches_of(*request);
  if (all % ranks != 0)
    refuse("a step has " + std::to_string(all) + " microbatches, which " + std::to_string(ranks) +
           " ranks cannot share out evenly. [T0888] hint: take a number of ranks that divides it, such as 1");
  strategy.gradient_accumulation = all / ranks;
  strategy.mesh = {};
  strategy.deal = {};
  return strategy;
}

}  // namespace tessera
