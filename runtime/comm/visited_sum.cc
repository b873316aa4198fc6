#include "runtime/comm/visited_sum.h"

#include <algorithm>
#include <vector>

#include "runtime/comm/pairwise_sum.h"

namespace tessera {
namespace {

constexpr std::size_t kPiece = 4096;  // elements: a piece and its sources stay in the first-level cache
static_assert(kPiece % SumVisitor::kAlignment == 0);

}  // namespace

void visit_sums(SumVisitor* visitor, std::size_t offset, const float* sums, std::size_t numel) {
  if (!visitor) return;
  for (std::size_t begin = 0; begin < numel; begin += kPiece)
    visitor->visit(offset + begin, sums + begin, std::min(kPiece, numel - begin));
}

void visited_sum(std::span<const void* const> sources, DType dtype, float* output, std::size_t offset,
                 std::size_t numel, SumVisitor* visitor) {
  if (!visitor) return pairwise_sum(sources, dtype, output + offset, numel);
  std::vector<const void*> at(sources.begin(), sources.end());
  for (std::size_t begin = 0; begin < numel; begin += kPiece) {
    const std::size_t length = std::min(kPiece, numel - begin);
    pairwise_sum(at, dtype, output + offset + begin, length);
    visitor->visit(offset + begin, output + offset + begin, length);
    for (const void*& source : at) source = static_cast<const std::byte*>(source) + length * size_of(dtype);
  }
}

}  // namespace tessera
