#pragma once

#include <vector>

#include "sharding/compress/gradient_method.h"
#include "sharding/layout/factor_layout.h"

namespace tessera {

/// PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2), for each matrix M, to which is added what this
/// rank's last contribution lacked:
///
///   P = sum over ranks of M Q;  orthonormalize P
///   Q = sum over ranks of M^T P;  the sum is P Q^T;  kept: M - P Q^T / ranks
///
/// Q is kept, and the next reduction begins with it. The first Q is random, and so are columns of Q that became zeros;
/// they are the same on all ranks. All matrices of the group go in two all-reduces of fp32; elements that are in no
/// matrix go with the first.
class PowerSgd final : public GradientMethod {
 public:
  PowerSgd(const MethodSite& at, std::int64_t rank);

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override;

 private:
  const FactorLayout layout_;
  const std::int64_t rank_;
  std::vector<std::int64_t> numbers_;  ///< MethodSite::numbers of each factored tensor
  float* const kept_;
  float* const right_;
  float* const first_;
};

}  // namespace tessera
