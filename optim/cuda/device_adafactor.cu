// This file computes Adafactor on a GPU. It is compiled without contraction of a * b + c into one rounding, like the
// CPU's loops.
//
// A step has at most five launches. sum_rows_and_columns sums rows, and then columns of blocks of rows.
// finish_rows_and_columns adds up the sums of blocks. Both are used only for tensors of two or more dimensions.
// `divide` computes the updates, and sums their squares for each block of elements. In sum_blocks, one warp adds up the
// blocks and computes the factor. move_parameter updates the parameter. A warp's lanes are the lanes of the CPU's sums,
// so the additions have the same order.

#include <algorithm>

#include "optim/adafactor_numbers.h"
#include "optim/cuda/device_adafactor.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kAdafactorThreads = 256, kAdafactorResidentBlocks = 8;
constexpr unsigned kAdafactorWarp = static_cast<unsigned>(kAdafactorLanes);

/// An element's place in a tensor, or a distance between two places.
struct AdafactorPlace {
  std::size_t matrix, row, column;
};

/// A tensor, and the memory that keeps its sums between kernels.
struct AdafactorMemory {
  std::size_t matrices, rows, columns, numel, blocks, row_blocks;
  AdafactorPlace stride;  ///< distance between elements that are kAdafactorThreads apart
  float *parameter, *gradient, *row_var, *col_var, *variance;
  double* moved;
  double *of_parameter, *of_updates;  ///< [blocks]: sums of squares
  double* column_sums;                ///< [matrices, row_blocks, columns]: sums of columns, if there is more than one
                                      ///< block of rows
  double* means;                      ///< [matrices]: means of `row_var`
};

TESSERA_ALWAYS_INLINE AdafactorPlace place_of(std::size_t element, std::size_t rows, std::size_t columns) {
  const std::size_t row = element / columns;
  return {row / rows, row % rows, element % columns};
}

__device__ std::size_t adafactor_thread() {
  return static_cast<std::size_t>(blockIdx.x) * kAdafactorThreads + threadIdx.x;
}
__device__ std::size_t adafactor_threads() { return static_cast<std::size_t>(gridDim.x) * kAdafactorThreads; }

/// Returns, in the first lane, the sum over the lanes of a warp.
__device__ double joined_lanes(double sum) {
#pragma unroll
  for (unsigned half = kAdafactorWarp / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, half, kAdafactorWarp);
  }
  return sum;
}

template <class Value, class Term>
__device__ double warp_sum(const Value* values, std::size_t count, const Term& term) {
  double sum = 0;
#pragma unroll 8
  for (std::size_t i = threadIdx.x % kAdafactorWarp; i < count; i += kAdafactorWarp) sum += term(values[i]);
  return joined_lanes(sum);
}

struct SquareOf {
  __device__ double operator()(float value) const { return adafactor_square(value); }
};
struct ItsValue {
  __device__ double operator()(double value) const { return value; }
};

__device__ void move_column(const AdafactorMemory& m, std::size_t column, double sum, float weight) {
  adafactor_move(m.col_var[column], adafactor_mean(sum, m.rows), weight);
}

/// First, each row is summed by one warp. Then each column of a block of rows is summed by one thread.
__global__ void __launch_bounds__(kAdafactorThreads) sum_rows_and_columns(AdafactorMemory m, float weight) {
  const std::size_t begin = adafactor_thread(), all = adafactor_threads();
  for (std::size_t r = begin / kAdafactorWarp; r < m.matrices * m.rows; r += all / kAdafactorWarp) {
    const double sum = warp_sum(m.gradient + r * m.columns, m.columns, SquareOf());
    if (threadIdx.x % kAdafactorWarp == 0) adafactor_move(m.row_var[r], adafactor_mean(sum, m.columns), weight);
  }
  for (std::size_t i = begin; i < m.matrices * m.row_blocks * m.columns; i += all) {
    const AdafactorPlace at = place_of(i, m.row_blocks, m.columns);
    const std::size_t first = at.row * kAdafactorRows;
    const std::size_t rows = m.rows - first < kAdafactorRows ? m.rows - first : kAdafactorRows;
    const float* const g = m.gradient + (at.matrix * m.rows + first) * m.columns + at.column;
    double sum = 0;
#pragma unroll 8
    for (std::size_t r = 0; r < rows; ++r) sum += adafactor_square(g[r * m.columns]);
    if (m.row_blocks == 1) {
      move_column(m, i, sum, weight);
    } else {
      m.column_sums[i] = sum;
    }
  }
}

/// First, one warp sums the `row_var` of each matrix. Then the sums of each column are added up by one thread.
__global__ void __launch_bounds__(kAdafactorThreads) finish_rows_and_columns(AdafactorMemory m, float weight) {
  const std::size_t begin = adafactor_thread(), all = adafactor_threads();
  for (std::size_t i = begin / kAdafactorWarp; i < m.matrices; i += all / kAdafactorWarp) {
    const double sum = warp_sum(m.row_var + i * m.rows, m.rows, ItsValue());
    if (threadIdx.x % kAdafactorWarp == 0) m.means[i] = adafactor_mean_of_rows(sum, m.rows);
  }
  if (m.row_blocks == 1) return;
  for (std::size_t i = begin; i < m.matrices * m.columns; i += all) {
    const double* const sums = m.column_sums + i / m.columns * m.row_blocks * m.columns + i % m.columns;
    double sum = 0;
#pragma unroll 8
    for (std::size_t block = 0; block < m.row_blocks; ++block) sum += sums[block * m.columns];
    move_column(m, i, sum, weight);
  }
}

/// The second moments of every kAdafactorThreads-th element, beginning with the element `first`.
class FactoredVariance {
 public:
  __device__ FactoredVariance(const AdafactorMemory& m, std::size_t first, float /*weight*/)
      : m_(m), at_(place_of(first, m.rows, m.columns)) {}
  __device__ float next(float /*g*/) {
    const float v =
        adafactor_variance(m_.row_var[at_.matrix * m_.rows + at_.row], m_.col_var[at_.matrix * m_.columns + at_.column],
                           static_cast<float>(m_.means[at_.matrix]));
    at_.matrix += m_.stride.matrix;
    at_.row += m_.stride.row;
    at_.column += m_.stride.column;
    if (at_.column >= m_.columns) {
      at_.column -= m_.columns;
      ++at_.row;
    }
    if (at_.row >= m_.rows) {
      at_.row -= m_.rows;
      ++at_.matrix;
    }
    return v;
  }

 private:
  const AdafactorMemory& m_;
  AdafactorPlace at_;
};

class VarianceOfElements {
 public:
  __device__ VarianceOfElements(const AdafactorMemory& m, std::size_t first, float weight)
      : variance_(m.variance + first), weight_(weight) {}
  __device__ float next(float g) {
    adafactor_move(*variance_, g * g, weight_);
    const float v = *variance_;
    variance_ += kAdafactorThreads;
    return v;
  }

 private:
  float* variance_;
  const float weight_;
};

/// Each thread block handles kAdafactorBlock elements at a time. All its threads compute updates. Then one warp adds up
/// the squares of the updates, and another warp adds up the parameter's squares.
template <class Variance>
__global__ void __launch_bounds__(kAdafactorThreads) divide(AdafactorMemory m, float weight) {
  __shared__ float updates[kAdafactorBlock], parameters[kAdafactorBlock];
  constexpr unsigned kEach = 4;  // number of elements that a thread loads together
  for (std::size_t block = blockIdx.x; block < m.blocks; block += gridDim.x) {
    const std::size_t begin = block * kAdafactorBlock;
    const auto count = static_cast<unsigned>(m.numel - begin < kAdafactorBlock ? m.numel - begin : kAdafactorBlock);
    Variance variance(m, begin + threadIdx.x, weight);
    for (unsigned first = threadIdx.x; first < count; first += kEach * kAdafactorThreads) {
      float g[kEach], p[kEach];
#pragma unroll
      for (unsigned k = 0; k < kEach; ++k) {
        const unsigned i = first + k * kAdafactorThreads;
        g[k] = i < count ? m.gradient[begin + i] : 0.0f;
        p[k] = i < count ? m.parameter[begin + i] : 0.0f;
      }
#pragma unroll
      for (unsigned k = 0; k < kEach; ++k) {
        const unsigned i = first + k * kAdafactorThreads;
        if (i >= count) break;
        const float update = adafactor_divided(g[k], variance.next(g[k]));
        m.gradient[begin + i] = update;
        updates[i] = update;
        parameters[i] = p[k];
      }
    }
    __syncthreads();
    if (threadIdx.x < 2 * kAdafactorWarp) {
      const bool is_parameter = threadIdx.x < kAdafactorWarp;
      const double sum = warp_sum(is_parameter ? parameters : updates, count, SquareOf());
      if (threadIdx.x % kAdafactorWarp == 0) (is_parameter ? m.of_parameter : m.of_updates)[block] = sum;
    }
    __syncthreads();
  }
}

/// One warp runs this kernel.
__global__ void sum_blocks(AdafactorMemory m, AdafactorNumbers numbers) {
  double of_parameter = 0, of_updates = 0;
#pragma unroll 8
  for (std::size_t i = threadIdx.x; i < m.blocks; i += kAdafactorWarp) {
    of_parameter += m.of_parameter[i];
    of_updates += m.of_updates[i];
  }
  of_parameter = joined_lanes(of_parameter);
  of_updates = joined_lanes(of_updates);
  if (threadIdx.x == 0) *m.moved = adafactor_moved(numbers, of_parameter, of_updates, m.numel);
}

__global__ void __launch_bounds__(kAdafactorThreads) move_parameter(AdafactorMemory m, float kept) {
  const auto moved = static_cast<float>(*m.moved);
#pragma unroll 4
  for (std::size_t i = adafactor_thread(); i < m.numel; i += adafactor_threads()) {
    m.parameter[i] = adafactor_updated(m.parameter[i], m.gradient[i], kept, moved);
  }
}

AdafactorMemory memory_of(const AdafactorTensor& t, const AdafactorSums& sums, double* scratch) {
  AdafactorMemory m{};
  m.matrices = static_cast<std::size_t>(t.matrices);
  m.rows = static_cast<std::size_t>(t.rows);
  m.columns = static_cast<std::size_t>(t.columns);
  m.numel = t.parameter.size();
  m.blocks = sums.blocks;
  m.row_blocks = adafactor_blocks(m.rows, kAdafactorRows);
  if (!t.row_var.empty()) m.stride = place_of(kAdafactorThreads, m.rows, m.columns);
  m.parameter = t.parameter.data();
  m.gradient = t.gradient.data();
  m.row_var = t.row_var.data();
  m.col_var = t.col_var.data();
  m.variance = t.variance.data();
  m.moved = scratch;
  m.of_parameter = m.moved + 1;
  m.of_updates = m.of_parameter + sums.blocks;
  m.column_sums = m.of_updates + sums.blocks;
  m.means = m.column_sums + sums.column_sums;
  return m;
}

/// Returns the number of thread blocks that together have `threads` threads, but at most the number that the device can
/// run at once.
unsigned blocks_with(std::size_t threads, int processors) {
  const std::size_t most = static_cast<std::size_t>(processors) * kAdafactorResidentBlocks;
  return static_cast<unsigned>(std::min(adafactor_blocks(threads, kAdafactorThreads), most));
}

}  // namespace

cudaError_t step_adafactor(const AdafactorConfig& config, const AdafactorStep& step, const AdafactorTensor& tensor,
                           std::span<double> scratch, cudaStream_t stream) {
  if (tensor.parameter.empty()) return cudaSuccess;
  const AdafactorSums sums(tensor);
  if (scratch.size() < sums.count()) return cudaErrorInvalidValue;
  const AdafactorMemory m = memory_of(tensor, sums, scratch.data());
  const AdafactorNumbers numbers = adafactor_numbers(config, step);
  int processors = 0;
  cudaError_t error = multiprocessors(processors);
  const auto launch_with = [&](std::size_t threads, auto kernel, auto... arguments) {
    if (error != cudaSuccess) return;
    error = launch(kernel, blocks_with(threads, processors), kAdafactorThreads, stream, m, arguments...);
  };
  const bool is_factored = !tensor.row_var.empty();
  if (is_factored) {
    launch_with(std::max(m.matrices * m.rows * kAdafactorWarp, m.matrices * m.row_blocks * m.columns),
                sum_rows_and_columns, numbers.weight);
    launch_with(std::max(m.matrices * kAdafactorWarp, m.row_blocks > 1 ? m.matrices * m.columns : 0),
                finish_rows_and_columns, numbers.weight);
  }
  launch_with(m.blocks * kAdafactorThreads, is_factored ? divide<FactoredVariance> : divide<VarianceOfElements>,
              numbers.weight);
  if (error == cudaSuccess) error = launch(sum_blocks, 1, kAdafactorWarp, stream, m, numbers);
  launch_with(m.numel, move_parameter, numbers.kept);
  return error;
}

}  // namespace tessera::cuda
