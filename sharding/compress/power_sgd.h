#pragma once

#include <vector>

#include "sharding/compress/gradient_method.h"
#include "sharding/layout/factor_layout.h"

namespace tessera {

/// PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): of each matrix M, with what this rank's last
/// contribution lacked,
///
///   P = sum over ranks of M Q;  orthonormalize P
///   Q = sum over ranks of M^T P;  the sum is P Q^T;  kept: M - P Q^T / ranks
///
/// Q is kept to begin the next one with; the first is random, but the same on all ranks, as are its columns that became
/// zeros. All matrices of the group go in two all-reduces of fp32; elements of no matrix go with the
/// first.
class PowerSgd final : public GradientMethod {
 public:
  PowerSgd(const FlatGroup& group, std::int64_t rank, float* kept, float* work);

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override;

 private:
  const FactorLayout layout_;
  const std::int64_t rank_;
  std::vector<std::int64_t> numbers_;  ///< FlatParameter::number of each factored tensor
  float* const kept_;
  float* const right_;
  float* const first_;
};

}  // namespace tessera
