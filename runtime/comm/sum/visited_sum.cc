#include "runtime/comm/sum/visited_sum.h"

#include <absl/container/inlined_vector.h>

#include <algorithm>
#include <array>
#include <string>

#include "runtime/base/status.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/streaming.h"

namespace tessera {
namespace {

constexpr std::size_t kPiece = 256;  // number of elements; small, so that reads and writes overlap
static_assert(kPiece % SumVisitor::kAlignment == 0);

// A vector with one entry for each rank. It does not use the heap for up to 16 ranks.
template <class T>
using OfRanks = absl::InlinedVector<T, 16>;

bool contains(std::span<const void* const> sources, const void* output) {
  return std::find(sources.begin(), sources.end(), output) != sources.end();
}

/// The memory to which a sum is written.
struct Outputs {
  OfRanks<float*> streamed, kept;  ///< `streamed` is written past the caches, `kept` through them
};

/// Sums a piece where it stays in cache: in an output, or on the stack if some output is streamed. (A piece does not
/// stay in cache in an output that peers have read. The lines of such an output come back from the peers' caches one by
/// one, and the piece's next reader would wait for them.)
void sum_pieces(std::span<const void* const> sources, DType dtype, const Outputs& outputs, std::size_t numel,
                SumVisitor* visitor, std::size_t offset) {
  const auto& [streamed, kept] = outputs;
  if (streamed.empty() && kept.size() == 1 && !visitor) return pairwise_sum(sources, dtype, kept[0], numel);
  OfRanks<const void*> at(sources.begin(), sources.end());
  alignas(64) std::array<float, kPiece> stack;
  for (std::size_t begin = 0; begin < numel; begin += kPiece) {
    const std::size_t length = std::min(kPiece, numel - begin);
    float* const piece = streamed.empty() ? kept[0] + begin : stack.data();
    pairwise_sum(at, dtype, piece, length);
    for (float* output : kept) {
      if (output + begin != piece) keep_bytes(output + begin, piece, length * sizeof(float));
    }
    for (float* output : streamed) stream_bytes(output + begin, piece, length * sizeof(float));
    if (visitor) visitor->visit(offset + begin, piece, length);
    for (const void*& source : at) source = static_cast<const std::byte*>(source) + length * size_of(dtype);
  }
}

}  // namespace

void visit_sums(SumVisitor* visitor, std::size_t offset, const float* sums, std::size_t numel) {
  if (!visitor) return;
  for (std::size_t begin = 0; begin < numel; begin += kPiece)
    visitor->visit(offset + begin, sums + begin, std::min(kPiece, numel - begin));
}

void visited_sum(std::span<const void* const> sources, DType dtype, std::span<float* const> outputs, std::size_t numel,
                 SumVisitor* visitor, std::size_t offset) {
  const bool large = numel * sizeof(float) * outputs.size() >= kStreamBytes;
  Outputs into;
  // An output that is a source has just been read: its lines are in cache, so writing them costs nothing more.
  for (float* output : outputs) (large && !contains(sources, output) ? into.streamed : into.kept).push_back(output);
  sum_pieces(sources, dtype, into, numel, visitor, offset);
  if (!into.streamed.empty()) end_stream();
}

void visited_window_sum(std::span<const void* const> sources, DType dtype, float* output, const ShownSums& shown,
                        const SumWindow& window, SumVisitor* visitor) {
  const bool streams = window.whole * sizeof(float) >= kStreamBytes && !contains(sources, output);
  Outputs into;
  (streams ? into.streamed : into.kept).push_back(output);
  if (shown.to) (shown.streams ? into.streamed : into.kept).push_back(shown.to);
  sum_pieces(sources, dtype, into, window.numel, visitor, window.offset);
}

absl::Status check_device_sum(std::string_view label, DType dtype, const SumVisitor* visitor) {
  if (visitor)
    return make_error(ExitCode::kInternal,
                      std::string(label) + ": sums are made in device memory, where no SumVisitor can see them");
  if (is_reducible(dtype)) return absl::OkStatus();
  return make_error(ExitCode::kInternal,
                    std::string(label) + ": sums are of fp32, bf16 or fp16, got " + std::string(name_of(dtype)));
}

}  // namespace tessera
