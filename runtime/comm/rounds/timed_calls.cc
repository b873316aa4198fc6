#include "runtime/comm/rounds/timed_calls.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "runtime/base/status.h"
#include "runtime/comm/rounds/call_work.h"
#include "runtime/comm/rounds/fit_links.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// Makes the group's calls with its own buffers.
class Caller {
 public:
  static absl::StatusOr<Caller> make(Collectives& group, std::span<const TimedCall> calls) {
    std::size_t most = 0;
    for (const TimedCall& call : calls) most = std::max(most, call.bytes);
    Caller caller(group);
    // Sums of bf16 take twice the bytes of their input. Gathered data take the bytes of all ranks' parts.
    const std::size_t ranks = static_cast<std::size_t>(group.size());
    TESSERA_ASSIGN_OR_RETURN(caller.input_, group.allocate(most));
    TESSERA_ASSIGN_OR_RETURN(caller.output_, group.allocate(most * std::max<std::size_t>(2, ranks)));
    return caller;
  }

  absl::Status call(const TimedCall& what) {
    auto* const sums = reinterpret_cast<float*>(output_->data());
    const std::size_t numel = what.bytes / size_of(what.dtype);
    switch (what.operation) {
      case Operation::kReduceScatter:
        return group_.reduce_scatter("fit", input_->data(), what.dtype, sums, numel / group_.size()).wait();
      case Operation::kAllReduce:
        return group_.all_reduce("fit", input_->data(), what.dtype, sums, numel).wait();
      default:
        return group_.all_gather("fit", input_->data(), output_->data(), what.bytes).wait();
    }
  }

 private:
  explicit Caller(Collectives& group) : group_(group) {}

  Collectives& group_;
  std::unique_ptr<CommBuffer> input_, output_;
};

}  // namespace

absl::Status take_slowest(Collectives& group, std::span<std::int64_t> ns) {
  std::vector<std::int64_t> all(ns.size() * group.size());
  TESSERA_RETURN_IF_ERROR(group.all_gather("fit", ns.data(), all.data(), ns.size_bytes()).wait());
  for (std::size_t i = 0; i < all.size(); ++i) ns[i % ns.size()] = std::max(ns[i % ns.size()], all[i]);
  return absl::OkStatus();
}

double TimedCall::median_s() const {
  if (ns.empty()) return 0;
  std::vector<std::int64_t> sorted = ns;
  std::sort(sorted.begin(), sorted.end());
  return static_cast<double>(sorted[(sorted.size() - 1) / 2]) * 1e-9;
}

std::vector<TimedCall> calls_to_time(int ranks, std::size_t bytes) {
  std::vector<TimedCall> calls;
  const auto add = [&](Operation operation, DType dtype, std::size_t own) {
    for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing, Algorithm::kDoubling, Algorithm::kHalving})
      if (has_algorithm(operation, algorithm, own))
        calls.push_back({.operation = operation, .dtype = dtype, .bytes = own, .algorithm = algorithm});
  };
  add(Operation::kAllGather, DType::kU8, bytes);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::size_t of_slices = static_cast<std::size_t>(ranks) * size_of(dtype);
    const std::size_t whole = std::max(bytes / of_slices, std::size_t{1}) * of_slices;
    add(Operation::kReduceScatter, dtype, whole);
    add(Operation::kAllReduce, dtype, whole);
  }
  return calls;
}

absl::Status time_calls(Collectives& group, std::span<TimedCall> calls, const std::function<void(Algorithm)>& use,
                        const std::function<int(const TimedCall&)>& times) {
  TESSERA_ASSIGN_OR_RETURN(Caller caller, Caller::make(group, calls));
  for (TimedCall& call : calls) {
    use(call.algorithm);
    TESSERA_RETURN_IF_ERROR(caller.call(call));  // this is the warm-up
    TESSERA_RETURN_IF_ERROR(group.barrier("fit").wait());
    const std::size_t first = call.ns.size();
    for (int left = times(call); left > 0; --left) {
      const auto begin = Clock::now();
      TESSERA_RETURN_IF_ERROR(caller.call(call));
      call.ns.push_back(std::chrono::nanoseconds(Clock::now() - begin).count());
    }
    use(Algorithm::kDirect);
    TESSERA_RETURN_IF_ERROR(take_slowest(group, std::span(call.ns).subspan(first)));
  }
  return absl::OkStatus();
}

LinkFit fit_calls(int ranks, std::span<const TimedCall> calls) {
  std::vector<TimedWork> works;
  for (const TimedCall& call : calls)
    works.push_back({work_of(call.operation, call.algorithm, ranks, call.dtype, call.bytes), call.median_s()});
  return fit_links(works);
}

}  // namespace tessera
