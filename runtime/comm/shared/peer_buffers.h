#pragma once

#include <span>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/shared/meeting.h"

namespace tessera {

/// All ranks' buffers of one call, where this rank sees them; and sums over them.
class PeerBuffers {
 public:
  PeerBuffers(Peers& peers, SharedSpace& space);

  /// Views the buffers that ranks published for `phase`. Errors: one is a CommBuffer that this rank has freed.
  absl::Status view(const Meeting& meeting, std::uint64_t phase);
  /// Null where unreachable.
  const std::byte* input(int rank) const { return inputs_[rank]; }
  bool inputs_reachable() const { return reachable(inputs_); }
  bool outputs_reachable() const { return reachable(outputs_); }

  /// The inputs of all from `offset` bytes on, in rank order; valid until the next call.
  std::span<const void* const> inputs_from(std::size_t offset);

  /// A reduce-scatter's share of this rank: the sum of its `numel` elements of all inputs, into `output`.
  void sum_part(DType dtype, float* output, std::size_t numel, SumVisitor* visitor);
  /// An all-reduce's: its slice of the `numel` elements of all inputs, summed into the outputs of all.
  void sum_slice(DType dtype, std::size_t numel);

 private:
  static bool reachable(const std::vector<std::byte*>& views);

  Peers& peers_;
  SharedSpace& space_;
  std::vector<std::byte*> inputs_, outputs_;
  std::vector<const void*> sources_;  // scratch of the sums
  std::vector<float*> targets_;
};

/// The part of [0, numel) that `rank` of `size` sums. Parts begin at cache lines, so that no two ranks write one line.
struct Slice {
  std::size_t begin, numel;
};
Slice slice_of(std::size_t numel, int rank, int size);

}  // namespace tessera
