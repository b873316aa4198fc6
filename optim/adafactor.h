#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/strategy.h"

namespace tessera {

/// A tensor whose last two dimensions are `rows` and `columns`; `matrices` is the product of the other dimensions.
/// Elements lie row by row.
struct AdafactorTensor {
  std::int64_t matrices = 1, rows = 1, columns = 0;
  std::span<float> parameter;  ///< [matrices * rows * columns]
  std::span<float> gradient;   ///< [matrices * rows * columns]; it is overwritten
  /// The states, which are zeros before the first step. For two or more dimensions: running means of the squares of
  /// each row and of each column.
  std::span<float> row_var;  ///< [matrices * rows]
  std::span<float> col_var;  ///< [matrices * columns]
  /// For tensors with fewer than two dimensions: the running mean of the square of each element. `row_var` and
  /// `col_var` are then empty.
  std::span<float> variance;
};

/// The numbers of one tensor in a step.
struct AdafactorStep {
  double lr = 0, weight_decay = 0;
  std::int64_t step = 1;  ///< number of this step, counted from 1
};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235), as `torch.optim.Adafactor` defines it without `eps1`:
///
///   w = step^beta2_decay
///   r = r + w (mean over columns of g^2 - r),   c = c + w (mean over rows of g^2 - c)
///   v = r c^T / max(mean(r), eps),   or for vectors v = v + w (g^2 - v)
///   u = g / sqrt(max(v, eps^2)),     eps = 2^-23
///   p = (1 - lr weight_decay) p - u max(min_rms, rms(p)) min(lr, 1 / sqrt(step)) / max(1, rms(u) / clip_threshold)
///
/// Sums are made in fp64, in an order that depends only on the tensor's shape. So they have the same bits on every rank
/// and machine, and on GPUs.
/// - A row's squares, and a matrix's r, are summed over 32 lanes. Lane l adds up the values l, l + 32, l + 64 and so
///   on. Then the upper half of the lanes is added to the lower half, down to one lane.
/// - The squares of a whole tensor (rms) are summed over lanes for each 4096 values, and then these sums are added up
///   in the same way.
/// - A column is summed, row after row, over each 256 rows; then these sums are added one after another.
///
/// The step does not allocate. Many threads may call it at once, for different tensors.
void step_adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& tensor);

/// Returns the number of doubles of scratch memory that a GPU needs for the tensor (DeviceKernels::adafactor).
std::size_t adafactor_scratch(const AdafactorTensor& tensor);

}  // namespace tessera
