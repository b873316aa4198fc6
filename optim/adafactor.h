#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/strategy.h"

namespace tessera {

/// A tensor whose last two dimensions are `rows` and `columns`; `matrices` is the product of the others. Elements lie
/// row by row.
struct AdafactorTensor {
  std::int64_t matrices = 1, rows = 1, columns = 0;
  std::span<float> parameter;  ///< it has matrices * rows * columns elements
  std::span<float> gradient;   ///< [matrices * rows * columns]; overwritten
  /// States, zeros before the first step: running means of the squares of each row and of each column ...
  std::span<float> row_var;  ///< it has matrices * rows elements
  std::span<float> col_var;  ///< it has matrices * columns elements
  /// ... or, for tensors of fewer than two dimensions, of each element. Then `row_var` and `col_var` are empty.
  std::span<float> variance;
};

/// The numbers of one tensor in a step.
struct AdafactorStep {
  double lr = 0, weight_decay = 0;
  std::int64_t step = 1;  ///< number of this step, from 1
};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235), as `torch.optim.Adafactor` defines it without `eps1`:
///
///   w = step^beta2_decay
///   r = r + w (mean over columns of g^2 - r),   c = c + w (mean over rows of g^2 - c)
///   v = r c^T / max(mean(r), eps),   or of vectors v = v + w (g^2 - v)
///   u = g / sqrt(max(v, eps^2)),     eps = 2^-23
///   p = (1 - lr weight_decay) p - u max(min_rms, rms(p)) min(lr, 1 / sqrt(step)) / max(1, rms(u) / clip_threshold)
///
/// Sums are made in fp64, in an order that depends on the tensor's shape alone: they have the same bits on every rank
/// and machine, and on GPUs.
/// - A row's squares, and a matrix's r, are summed over 32 lanes: lane l adds up values l, l + 32, l + 64, ...; then
///   the upper half of the lanes is added to the lower one, down to one lane.
/// - The squares of a whole tensor (rms) are summed over lanes for each 4096 values, and then these sums are added up
/// in the same way.
/// - A column is summed over each 256 rows one after the other, and then these sums are added one after the other.
///
/// The step takes no memory from the heap. Many threads may call it at once, for different tensors.
void step_adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& tensor);

/// Returns how many doubles of scratch memory a GPU needs for the tensor (DeviceKernels::adafactor).
std::size_t adafactor_scratch(const AdafactorTensor& tensor);

}  // namespace tessera
