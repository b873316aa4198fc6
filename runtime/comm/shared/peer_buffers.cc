#include "runtime/comm/shared/peer_buffers.h"

#include <algorithm>

#include "runtime/base/seeded_fault.h"
#include "runtime/base/status.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {

Slice slice_of(std::size_t numel, int rank, int size) {
  constexpr std::size_t kLineElements = 16;
  const std::size_t even = (numel + size - 1) / size;
  const std::size_t step = (even + kLineElements - 1) / kLineElements * kLineElements;
  const std::size_t begin = std::min(numel, step * rank);
  return {begin, std::min(numel - begin, step)};
}

PeerBuffers::PeerBuffers(Peers& peers, SharedSpace& space)
    : peers_(peers),
      space_(space),
      inputs_(peers.size()),
      outputs_(peers.size()),
      sources_(peers.size()),
      targets_(peers.size()) {}

absl::Status PeerBuffers::view(const Meeting& meeting, std::uint64_t phase) {
  for (int q = 0; q < peers_.size(); ++q) {
    const Location input = meeting.input_of(q, phase), output = meeting.output_of(q, phase);
    inputs_[q] = input.reachable() ? space_.view(q, input) : nullptr;
    outputs_[q] = output.reachable() ? space_.view(q, output) : nullptr;
    if ((input.reachable() && !inputs_[q]) || (output.reachable() && !outputs_[q]))
      return peers_.fail(
          make_error(ExitCode::kInternal,
                     peers_.prefix() + peers_.who(q) + " uses a CommBuffer whose counterpart was freed on this rank"));
  }
  return absl::OkStatus();
}

bool PeerBuffers::reachable(const std::vector<std::byte*>& views) {
  return std::find(views.begin(), views.end(), nullptr) == views.end();
}

std::span<const void* const> PeerBuffers::inputs_from(std::size_t offset) {
  for (int q = 0; q < peers_.size(); ++q) sources_[q] = inputs_[q] + offset;
  return sources_;
}

void PeerBuffers::sum_part(DType dtype, float* output, std::size_t numel, SumVisitor* visitor) {
  visited_sum(inputs_from(peers_.rank() * numel * size_of(dtype)), dtype, {&output, 1}, numel, visitor);
}

void PeerBuffers::sum_slice(DType dtype, std::size_t numel) {
  Slice mine = slice_of(numel, peers_.rank(), peers_.size());
  if (seeded_fault(SeededFault::kSliceEndsAtALine)) mine.numel = mine.numel / 16 * 16;
  for (int q = 0; q < peers_.size(); ++q) targets_[q] = reinterpret_cast<float*>(outputs_[q]) + mine.begin;
  visited_sum(inputs_from(mine.begin * size_of(dtype)), dtype, targets_, mine.numel);
}

}  // namespace tessera
