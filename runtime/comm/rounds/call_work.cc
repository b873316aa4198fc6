#include "runtime/comm/rounds/call_work.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/comm/rounds/gather_rounds.h"
#include "runtime/comm/rounds/halving_rounds.h"

namespace tessera {
namespace {

/// The size of a slice: bytes on the wire, and elements.
struct SliceSize {
  double contribution = 0, result = 0, numel = 0;
};

void add_most(CallWork& most, const CallWork& one) {
  most.rounds = std::max(most.rounds, one.rounds);
  most.messages = std::max(most.messages, one.messages);
  most.bytes = std::max(most.bytes, one.bytes);
  most.adds = std::max(most.adds, one.adds);
}

/// Returns the work of one rank in these rounds.
CallWork work_of_rounds(const Rounds& rounds, const SliceSize& slice) {
  CallWork work;
  const auto bytes_of = [&](const std::vector<SliceMessage>& messages) {
    double bytes = 0;
    for (const SliceMessage& message : messages)
      bytes += static_cast<double>(message.count) * (message.is_contribution ? slice.contribution : slice.result);
    return bytes;
  };
  for (const Round& round : rounds) {
    ++work.rounds;
    work.messages += static_cast<double>(std::max(round.sends.size(), round.receives.size()));
    work.bytes += std::max(bytes_of(round.sends), bytes_of(round.receives));
    for (const SliceMessage& message : round.receives)
      work.adds += round.adds ? static_cast<double>(message.count) * slice.numel : 0;
  }
  return work;
}

CallWork gather_work(Algorithm algorithm, int ranks, double bytes) {
  const SliceSize slice{0, bytes, 0};
  // All ranks have equal work, except for messages that wrap around the end of the buffer and are sent as two. The last
  // rank has the most messages of this kind.
  if (algorithm == Algorithm::kRing) return work_of_rounds(ring_gather(0, ranks), slice);
  if (algorithm == Algorithm::kDoubling) return work_of_rounds(doubling_gather(ranks - 1, ranks), slice);
  return {1, ranks - 1.0, (ranks - 1.0) * bytes, 0};
}

/// Returns the work of a halving algorithm for `numel` elements of a rank's input.
CallWork halving_work(Operation operation, int ranks, DType dtype, double numel) {
  const bool scatters = operation == Operation::kReduceScatter;
  const int count = scatters ? ranks : halving_slices(ranks);
  const StridedSlices slices(static_cast<std::size_t>(count));
  const double of_slice = numel / count;
  const SliceSize slice{of_slice * static_cast<double>(size_of(dtype)), of_slice * sizeof(float), of_slice};
  CallWork most;
  for (int rank = 0; rank < ranks; ++rank)
    add_most(most,
             work_of_rounds(scatters ? halving_reduce_scatter(rank, ranks, slices) : halving_all_reduce(rank, ranks),
                            slice));
  return most;
}

}  // namespace

CallWork work_of(Operation operation, Algorithm algorithm, int ranks, DType dtype, std::size_t bytes) {
  const auto input = static_cast<double>(bytes);
  if (operation == Operation::kAllGather) return gather_work(algorithm, ranks, input);
  const double numel = input / static_cast<double>(size_of(dtype)), others = ranks - 1.0;
  if (operation == Operation::kAllReduce && algorithm != Algorithm::kHalving && bytes <= kDoublingBytes) {
    CallWork work = gather_work(algorithm, ranks, input);
    work.adds = others * numel;
    return work;
  }
  const double pieces = std::max(1.0, std::ceil(input / static_cast<double>(kPieceBytes)));
  if (algorithm == Algorithm::kHalving) {
    CallWork work = halving_work(operation, ranks, dtype, numel);
    work.rounds *= pieces;
    work.messages *= pieces;
    return work;
  }
  const double part = others / ranks;
  const bool gathers = operation == Operation::kAllReduce;
  const double phases = gathers ? 2 : 1;
  return {phases * pieces, phases * pieces * others, part * (input + (gathers ? numel * sizeof(float) : 0)),
          part * numel};
}

}  // namespace tessera
