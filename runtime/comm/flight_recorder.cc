#include "runtime/comm/flight_recorder.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/comm/observed_collectives.h"

namespace tessera {

/// Records the calls of one group (ObservedCollectives).
class RecordedGroup {
 public:
  RecordedGroup(std::shared_ptr<FlightRecorder> recorder, std::size_t number)
      : recorder_(std::move(recorder)), number_(number) {}

  std::uint64_t begins(const CallSignature& call) { return recorder_->begin(number_, call); }
  void waits(std::uint64_t) {}
  void leaves(std::uint64_t call, const absl::Status& status, bool is_over) {
    if (is_over || !status.ok()) recorder_->end(number_, call, status);
  }
  absl::Status cause_of(const absl::Status& failure) const { return failure; }
  void aborted(const absl::Status& reason) { recorder_->failed(reason); }
  void ends() {}

 private:
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::size_t number_;
};

namespace {

double seconds_of_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::shared_ptr<FlightRecorder> FlightRecorder::from_environment(int rank, int world_size) {
  const char* const folder = std::getenv("TESSERA_FLIGHT_RECORDS");
  if (!folder || !*folder || world_size == 1) return nullptr;
  return std::make_shared<FlightRecorder>(folder, rank, world_size);
}

FlightRecorder::FlightRecorder(std::string folder, int rank, int world_size)
    : folder_(std::move(folder)), rank_(rank), world_size_(world_size), start_s_(seconds_of_clock()) {}

std::shared_ptr<Collectives> FlightRecorder::record(const std::string& name, std::shared_ptr<Collectives> group) {
  if (group->gpu() != Collectives::kHostMemory) return group;
  const MutexLock lock(mutex_);
  groups_.push_back({name, 0, std::vector<Call>(kCalls)});
  auto recorded = std::make_shared<RecordedGroup>(shared_from_this(), groups_.size() - 1);
  return std::make_shared<ObservedCollectives<RecordedGroup>>(std::move(recorded), std::move(group));
}

double FlightRecorder::now_s() const { return seconds_of_clock() - start_s_; }

std::uint64_t FlightRecorder::begin(std::size_t group, CallSignature signature) {
  const MutexLock lock(mutex_);
  Group& called = groups_[group];
  signature.sequence = ++called.calls;
  called.last[signature.sequence % kCalls] = {signature, now_s()};
  return signature.sequence;
}

void FlightRecorder::end(std::size_t group, std::uint64_t call, const absl::Status& status) {
  {
    const MutexLock lock(mutex_);
    Call& ended = groups_[group].last[call % kCalls];
    if (status.ok() && ended.signature.sequence == call) ended.ended_s = now_s();
  }
  if (!status.ok()) failed(status);
}

/// Writes the record. If the file cannot be written, only a warning is logged: the failure itself is reported anyway.
void FlightRecorder::failed(const absl::Status& why) {
  const MutexLock lock(mutex_);
  if (std::exchange(is_written_, true)) return;
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  const std::string path = fmt::format("{}/rank-{:05}.json", folder_, rank_), partial = path + ".partial";
  std::filesystem::remove(partial, error);
  // Mode x makes a new file. A link that a stranger put there is thus not followed.
  std::FILE* const file = std::fopen(partial.c_str(), "wxe");
  const std::string record = text(why);
  bool is_written = file != nullptr && std::fwrite(record.data(), 1, record.size(), file) == record.size();
  if (file != nullptr && std::fclose(file) != 0) is_written = false;
  if (is_written) std::filesystem::rename(partial, path, error);
  if (!is_written || error) {
    log_warning("the flight record " + path + " cannot be written");
  } else {
    log_warning("flight record: " + path);
  }
}

std::string FlightRecorder::text(const absl::Status& why) const {
  nlohmann::ordered_json record = {{"rank", rank_},
                                   {"world_size", world_size_},
                                   {"why", message_of(why)},
                                   {"groups", nlohmann::ordered_json::array()}};
  for (const Group& group : groups_) {
    nlohmann::ordered_json calls = nlohmann::ordered_json::array();
    const std::uint64_t first = group.calls > kCalls ? group.calls - kCalls + 1 : 1;
    for (std::uint64_t number = first; number <= group.calls; ++number) {
      const Call& call = group.last[number % kCalls];
      calls.push_back(
          {{"number", number},
           {"operation", name_of(call.signature.operation)},
           {"label", call.signature.label_text()},
           {"count", call.signature.count},
           {"dtype", name_of(call.signature.dtype)},
           {"began_s", call.began_s},
           {"ended_s", call.ended_s < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(call.ended_s)}});
    }
    record["groups"].push_back({{"name", group.name}, {"calls", std::move(calls)}});
  }
  return record.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tessera
