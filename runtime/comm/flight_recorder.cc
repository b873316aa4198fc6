#include "runtime/comm/flight_recorder.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {

/// Something started, whose end is noted.
class RecordedWork final : public Work::State {
 public:
  RecordedWork(std::shared_ptr<FlightRecorder> recorder, std::size_t group, std::uint64_t call, Work work)
      : recorder_(std::move(recorder)), group_(group), call_(call), work_(std::move(work)) {}

  absl::Status advance() override { return noted(work_.advance(), /*is_over=*/false); }
  absl::Status wait() override { return noted(work_.wait(), /*is_over=*/true); }

 private:
  absl::Status noted(absl::Status status, bool is_over) {
    if (is_over || !status.ok()) recorder_->end(group_, call_, status);
    return status;
  }

  const std::shared_ptr<FlightRecorder> recorder_;
  const std::size_t group_;
  const std::uint64_t call_;
  Work work_;
};

/// A group whose calls are noted.
class RecordedCollectives final : public Collectives {
 public:
  RecordedCollectives(std::shared_ptr<FlightRecorder> recorder, std::size_t number, std::shared_ptr<Collectives> group)
      : recorder_(std::move(recorder)), number_(number), group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  TransportKind kind() const override { return group_->kind(); }
  std::string transport() const override { return group_->transport(); }
  int gpu() const override { return group_->gpu(); }
  bool reduces_in_background() const override { return group_->reduces_in_background(); }
  bool gathers_in_background() const override { return group_->gathers_in_background(); }
  int compressed_part() const override { return group_->compressed_part(); }
  bool shares_memory() const override { return group_->shares_memory(); }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override {
    return allocated(Operation::kAllocate, bytes, [&] { return group_->allocate(bytes); });
  }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes) override {
    return allocated(Operation::kAllocateCommon, bytes, [&] { return group_->allocate_common(bytes); });
  }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return recorded(Operation::kBroadcast, label, DType::kU8, bytes,
                    [&] { return group_->broadcast(label, data, bytes, root); });
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    return recorded(Operation::kAllToAll, label, DType::kU8, bytes,
                    [&] { return group_->all_to_all(label, input, output, bytes); });
  }
  Work barrier(std::string_view label) override {
    return recorded(Operation::kBarrier, label, DType::kU8, 0, [&] { return group_->barrier(label); });
  }
  void abort(const absl::Status& reason) override {
    recorder_->failed(reason);
    group_->abort(reason);
  }
  void leave() override { group_->leave(); }
  absl::Status status() const override { return group_->status(); }

 protected:
  Work do_all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes,
                     const GatherOptions& options) override {
    return recorded(Operation::kAllGather, label, DType::kU8, bytes,
                    [&] { return group_->all_gather(label, shard, full, bytes, options); });
  }
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                         SumVisitor* visitor, const ReduceOptions& options) override {
    return recorded(Operation::kReduceScatter, label, dtype, numel,
                    [&] { return group_->reduce_scatter(label, input, dtype, output, numel, visitor, options); });
  }
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     SumVisitor* visitor, const ReduceOptions& options) override {
    return recorded(Operation::kAllReduce, label, dtype, numel,
                    [&] { return group_->all_reduce(label, input, dtype, output, numel, visitor, options); });
  }

 private:
  template <class Start>
  Work recorded(Operation operation, std::string_view label, DType dtype, std::size_t count, const Start& start) {
    const std::uint64_t call = recorder_->begin(number_, make_signature(operation, label, dtype, count));
    return Work(std::make_unique<RecordedWork>(recorder_, number_, call, start()));
  }
  template <class Allocate>
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocated(Operation operation, std::size_t bytes,
                                                        const Allocate& allocate) {
    const std::uint64_t call = recorder_->begin(number_, make_signature(operation, "", DType::kU8, bytes));
    absl::StatusOr<std::unique_ptr<CommBuffer>> memory = allocate();
    recorder_->end(number_, call, memory.status());
    return memory;
  }

  const std::shared_ptr<FlightRecorder> recorder_;
  const std::size_t number_;
  const std::shared_ptr<Collectives> group_;
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
  std::lock_guard lock(mutex_);
  groups_.push_back({name, 0, std::vector<Call>(kCalls)});
  return std::make_shared<RecordedCollectives>(shared_from_this(), groups_.size() - 1, std::move(group));
}

double FlightRecorder::now_s() const { return seconds_of_clock() - start_s_; }

std::uint64_t FlightRecorder::begin(std::size_t group, CallSignature signature) {
  std::lock_guard lock(mutex_);
  Group& called = groups_[group];
  signature.sequence = ++called.calls;
  called.last[signature.sequence % kCalls] = {signature, now_s()};
  return signature.sequence;
}

void FlightRecorder::end(std::size_t group, std::uint64_t call, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    Call& ended = groups_[group].last[call % kCalls];
    if (status.ok() && ended.signature.sequence == call) ended.ended_s = now_s();
  }
  if (!status.ok()) failed(status);
}

/// A file that cannot be written is worth a warning: what failed is told all the same.
void FlightRecorder::failed(const absl::Status& why) {
  std::lock_guard lock(mutex_);
  if (std::exchange(is_written_, true)) return;
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  const std::string path = fmt::format("{}/rank-{:05}.json", folder_, rank_), partial = path + ".partial";
  std::ofstream file(partial, std::ios::trunc);
  file << text(why);
  file.close();
  if (file) std::filesystem::rename(partial, path, error);
  if (!file || error) {
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
