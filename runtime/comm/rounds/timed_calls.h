#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/rounds/algorithm.h"
#include "runtime/comm/rounds/link_fit.h"

namespace tessera {

/// One collective made with one algorithm, and the time that it took.
struct TimedCall {
  Operation operation = Operation::kAllGather;
  DType dtype = DType::kU8;
  std::size_t bytes = 0;  ///< bytes that a rank gives: its shard of an all_gather, its input of a reduction
  Algorithm algorithm = Algorithm::kDirect;
  std::vector<std::int64_t> ns = {};  ///< time of the slowest rank in each run

  double median_s() const;  ///< returns 0 if `ns` is empty
};

/// Replaces each time in `ns` by the time of the slowest rank. The call is collective; `ns` has the same size on every
/// rank.
absl::Status take_slowest(Collectives& group, std::span<std::int64_t> ns);

/// Returns the calls to time, with all algorithms that they have: all-gathers of `bytes` per rank, and reductions of
/// fp32 and bf16 of the same size, or a little more (ranks get equal parts). Calls of one collective follow each other.
std::vector<TimedCall> calls_to_time(int ranks, std::size_t bytes);

/// Makes each of `calls` once, and then `times(call)` times more; the durations of the later runs are added to
/// `TimedCall::ns`. `use` sets the algorithm of the later calls of `group`. The call is collective; every rank gets the
/// same durations. Errors are those of the group.
absl::Status time_calls(Collectives& group, std::span<TimedCall> calls, const std::function<void(Algorithm)>& use,
                        const std::function<int(const TimedCall&)>& times);

/// Returns fit_links of the medians of timed calls of `ranks` ranks.
LinkFit fit_calls(int ranks, std::span<const TimedCall> calls);

}  // namespace tessera
