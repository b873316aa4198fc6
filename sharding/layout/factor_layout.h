#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/shapes.h"

namespace tessera {

/// A tensor whose gradient is sent as two factors, with the offsets at which its data begins.
struct FactoredTensor {
  std::size_t tensor = 0;  ///< index of the tensor in its group
  MatrixShape shape;       ///< shape of the elements as they lie in memory
  std::int64_t offset = 0, kept = 0;
  std::int64_t left = 0, right = 0;
};

/// The division of a group's gradients by PowerSGD (Vogels et al., arXiv 1905.13727). It consists of integers, which
/// are the same on every rank.
///
/// A tensor of two or more dimensions is a matrix [outermost dimension in memory, all others]. It is sent as factors if
/// these are smaller than the matrix. All other elements are sent unchanged. All elements are fp32. The middle column
/// names the FactoredTensor field that says where a tensor begins:
///
///   gradients [layout]         offset   the flat buffer
///   kept      [kept_numel]     kept     matrices only: what this rank's earlier messages left out
///   first     [first_numel]    left     the first message: left factors [rank, rows], then all other elements
///   second    [second_numel]   right    second message: right factors [rank, columns], kept for the next reduction
class FactorLayout {
 public:
  FactorLayout() = default;
  FactorLayout(const GroupShape& group, std::int64_t rank);

  std::span<const FactoredTensor> tensors() const { return tensors_; }
  /// Returns the extents of the flat buffer whose elements are sent unchanged.
  std::span<const Extent> plain() const { return plain_; }
  std::int64_t plain_begin() const { return left_numel_; }  ///< index in the first message where plain() begins
  std::int64_t kept_numel() const { return kept_numel_; }
  std::int64_t second_begin() const;  ///< index at which the second message begins, behind the kept residuals
  std::int64_t first_numel() const { return first_numel_; }
  std::int64_t second_numel() const { return second_numel_; }

 private:
  std::vector<FactoredTensor> tensors_;
  std::vector<Extent> plain_;
  std::int64_t kept_numel_ = 0, left_numel_ = 0, first_numel_ = 0, second_numel_ = 0;
};

/// Returns the number of a group's gradients that a method sends: the given fraction of all gradients, rounded up.
std::int64_t count_of(const GroupShape& group, double fraction);

}  // namespace tessera
