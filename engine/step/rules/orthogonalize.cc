#include "engine/step/rules/orthogonalize.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

#include "sharding/layout/matrix_deal.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

constexpr double kA = 3.4445, kB = -4.775, kC = 2.0315;
constexpr double kLeastNorm = 1e-7;

}  // namespace

void orthogonalize(float* matrix, MatrixShape shape, std::int64_t steps, std::span<float> work, DType dtype,
                   c10::Device device) {
  const Unrecorded unrecorded;
  const at::Tensor whole = memory_view(matrix, DType::kF32, {shape.rows, shape.columns}, std::nullopt, device);
  const std::int64_t shorter = std::min(shape.rows, shape.columns), longer = std::max(shape.rows, shape.columns);
  const bool is_tall = shape.rows > shape.columns;
  float* place = work.data();
  const auto take = [&](std::int64_t rows, std::int64_t columns) {
    float* const begin = std::exchange(place, place + MatrixDeal::in_whole_lines(rows * columns));
    return memory_view(begin, dtype, {rows, columns}, std::nullopt, device);
  };
  // A wide matrix is updated in place, unless the computation is in bf16.
  const bool is_in_place = !is_tall && dtype == DType::kF32;
  at::Tensor x = is_in_place ? whole : take(shorter, longer), next = take(shorter, longer);
  at::Tensor gram = take(shorter, shorter), factor = take(shorter, shorter);
  whole.div_(at::linalg_vector_norm(whole).clamp_min(kLeastNorm));
  if (!is_in_place) x.copy_(is_tall ? whole.t() : whole);
  for (std::int64_t step = 0; step < steps; ++step) {
    at::mm_out(gram, x, x.t());
    at::addmm_out(factor, gram, gram, gram, kB, kC);
    at::addmm_out(next, x, factor, x, kA, 1.0);
    std::swap(x, next);
  }
  const at::Tensor result = is_tall ? x.t() : x;
  if (!result.is_alias_of(whole)) whole.copy_(result);
}

}  // namespace tessera
