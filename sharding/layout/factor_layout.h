#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/shapes.h"

namespace tessera {

/// A tensor whose gradient is sent as two factors, and where what belongs to it begins.
struct FactoredTensor {
  std::size_t tensor = 0;  ///< of the group
  MatrixShape shape;       ///< as its elements lie in memory
  std::int64_t offset = 0, kept = 0;
  std::int64_t left = 0, right = 0;
};

/// How PowerSGD (Vogels et al., arXiv 1905.13727) cuts a group's gradients. Integers only; the same on every rank.
///
/// A tensor of two or more dimensions is a matrix [outermost dimension in memory, all others], and goes as factors where those are shorter than it. All
/// other elements go as they are. Elements, of fp32, and where a FactoredTensor begins in them:
///
///   gradients [layout]         offset   the flat buffer
///   kept      [kept_numel]     kept     of matrices: what this rank's earlier contributions lacked
///   first     [first_numel]    left     the first message: left factors [rank, rows], then what goes as it is
///   second    [second_numel]   right    the second message, kept to begin the next one with: right factors [rank, columns]
class FactorLayout {
 public:
  FactorLayout() = default;
  FactorLayout(const GroupShape& group, std::int64_t rank);

  std::span<const FactoredTensor> tensors() const { return tensors_; }
  std::span<const Extent> plain() const { return plain_; }  ///< of the flat buffer: what goes as it is
  std::int64_t plain_begin() const { return left_numel_; }  ///< in the first message
  std::int64_t kept_numel() const { return kept_numel_; }
  std::int64_t second_begin() const;  ///< behind what is kept
  std::int64_t first_numel() const { return first_numel_; }
  std::int64_t second_numel() const { return second_numel_; }

 private:
  std::vector<FactoredTensor> tensors_;
  std::vector<Extent> plain_;
  std::int64_t kept_numel_ = 0, left_numel_ = 0, first_numel_ = 0, second_numel_ = 0;
};

/// How many of a group's gradients top-k sends: this share of them, rounded up.
std::int64_t count_of_largest(const GroupShape& group, double share);

/// What a reduction that sends gradients in one of these forms needs of a group, in fp32 in whole cache lines.
struct MethodMemory {
  std::int64_t kept = 0;  ///< from step to step, of the group's own
  std::int64_t work = 0;  ///< while the reduction is under way; groups have it by turns
};
MethodMemory power_sgd_memory(const GroupShape& group, std::int64_t rank);
MethodMemory top_k_memory(const GroupShape& group, double share, int ranks);

}  // namespace tessera
