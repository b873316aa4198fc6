#include "engine/step/orthogonalize.h"

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

void orthogonalize(float* matrix, MatrixShape shape, std::int64_t steps, std::span<float> work, c10::Device device) {
  const Unrecorded unrecorded;
  const auto view = [&](float* begin, std::int64_t rows, std::int64_t columns) {
    return memory_view(begin, DType::kF32, {rows, columns}, std::nullopt, device);
  };
  const at::Tensor whole = view(matrix, shape.rows, shape.columns);
  const std::int64_t shorter = std::min(shape.rows, shape.columns), longer = std::max(shape.rows, shape.columns);
  const bool is_tall = shape.rows > shape.columns;
  float* place = work.data();
  const auto take = [&](std::int64_t rows, std::int64_t columns) {
    float* const begin = std::exchange(place, place + MatrixDeal::in_whole_lines(rows * columns));
    return view(begin, rows, columns);
  };
  // A wide one is worked on where it lies.
  at::Tensor x = is_tall ? take(shorter, longer) : whole, next = take(shorter, longer);
  at::Tensor gram = take(shorter, shorter), factor = take(shorter, shorter);
  if (is_tall) x.copy_(whole.t());
  x.div_(at::linalg_vector_norm(x).clamp_min(kLeastNorm));
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
