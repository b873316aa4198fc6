#include "sharding/reduce/sum_memory.h"

#include <ATen/ops/add.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "runtime/comm/sum/joined_sum.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

at::Tensor view_of_sum(const float* values, std::int64_t numel, c10::Device device) {
  return flat_view(const_cast<float*>(values), DType::kF32, numel, device);
}

}  // namespace

void SumMemory::copy(const float* from, std::int64_t numel, float* to) const {
  if (numel == 0 || from == to) return;
  if (!device_.is_queued) {
    std::memcpy(to, from, static_cast<std::size_t>(numel) * sizeof(float));
    return;
  }
  const Unrecorded unrecorded;
  view_of_sum(to, numel, device_.device).copy_(view_of_sum(from, numel, device_.device));
}

void SumMemory::clear(float* values, std::int64_t numel) const {
  if (numel == 0) return;
  if (!device_.is_queued) {
    std::fill_n(values, numel, 0.0F);
    return;
  }
  const Unrecorded unrecorded;
  view_of_sum(values, numel, device_.device).zero_();
}

/// Joins sums as joined_sum does. Only the last addition writes to `output`, since `output` may be one of the sums that
/// still wait.
void SumMemory::join(std::span<const float* const> waiting, float* last, float* output, std::int64_t numel) const {
  if (!device_.is_queued) return joined_sum(waiting, last, output, static_cast<std::size_t>(numel));
  if (waiting.empty()) return copy(last, numel, output);
  const Unrecorded unrecorded;
  const at::Tensor sum = view_of_sum(last, numel, device_.device);
  for (std::size_t k = 0; k < waiting.size(); ++k) {
    at::Tensor to = k + 1 == waiting.size() ? view_of_sum(output, numel, device_.device) : sum;
    at::add_out(to, view_of_sum(waiting[k], numel, device_.device), sum);
  }
}

}  // namespace tessera
