#pragma once

#include <span>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/shared/meeting.h"

namespace tessera {

/// All ranks' buffers of one call, at the addresses where this rank sees them, and sums over them.
class PeerBuffers {
 public:
  PeerBuffers(Peers& peers, SharedSpace& space);

  /// Views the buffers that ranks published for `phase`. Error: a buffer lies in a CommBuffer that this rank has freed.
  absl::Status view(const Meeting& meeting, std::uint64_t phase);
  /// Returns null if the buffer is unreachable.
  const std::byte* input(int rank) const { return inputs_[rank]; }
  bool inputs_reachable() const { return reachable(inputs_); }
  bool outputs_reachable() const { return reachable(outputs_); }

  /// Returns all ranks' inputs from byte `offset` on, in rank order. The result is valid until the next call.
  std::span<const void* const> inputs_from(std::size_t offset);

  /// Makes this rank's share of a reduce-scatter: sums its `numel` elements of all inputs into `output`.
  void sum_part(DType dtype, float* output, std::size_t numel, SumVisitor* visitor);
  /// Makes this rank's share of an all-reduce: sums its slice of the `numel` elements of all inputs into the outputs of
  /// all ranks.
  void sum_slice(DType dtype, std::size_t numel);

 private:
  static bool reachable(const std::vector<std::byte*>& views);

  Peers& peers_;
  SharedSpace& space_;
  std::vector<std::byte*> inputs_, outputs_;
  std::vector<const void*> sources_;  // scratch of the sums
  std::vector<float*> targets_;
};

/// The part of [0, numel) that rank `rank` of `size` ranks sums. Parts begin at cache lines, so that no two ranks write
/// to one line.
struct Slice {
  std::size_t begin, numel;
};
/// Returns the part of one rank.
Slice slice_of(std::size_t numel, int rank, int size);

}  // namespace tessera
