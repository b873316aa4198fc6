#include <cstring>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/sum/low_rank.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"
#include "sharding/layout/factor_layout.h"

namespace tessera {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

LowRankShape low_rank(MatrixShape shape, std::int64_t rank) {
  return {size(shape.rows), size(shape.columns), size(rank)};
}

/// PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2). Each matrix M includes the residual of this rank's
/// last contribution:
///
///   P = sum over ranks of M Q;  orthonormalize P
///   Q = sum over ranks of M^T P;  the sum is P Q^T;  kept: M - P Q^T / ranks
///
/// Q is kept, and the next reduction begins with it. The first Q is random, and so are columns of Q that became zeros;
/// they are the same on all ranks. All matrices of the group are sent in two fp32 all-reduces. Elements that belong to
/// no matrix are sent in the first one.
class PowerSgd final : public GradientMethod {
 public:
  PowerSgd(const MethodSite& at, std::int64_t rank)
      : layout_(at.shape, rank),
        rank_(rank),
        kept_(at.kept),
        right_(at.kept + layout_.second_begin()),
        first_(at.work) {
    for (const FactoredTensor& tensor : layout_.tensors()) numbers_.push_back(at.numbers[tensor.tensor]);
  }

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t) override {
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      const FactoredTensor& tensor = layout_.tensors()[i];
      const LowRankShape shape = low_rank(tensor.shape, rank_);
      draw_missing(numbers_[i], right_ + tensor.right, shape.rank, shape.columns);
      add_and_project(data + tensor.offset, kept_ + tensor.kept, right_ + tensor.right, first_ + tensor.left, shape);
    }
    float* to = first_ + layout_.plain_begin();
    for (const Extent extent : layout_.plain()) {
      std::memcpy(to, data + extent.offset, size(extent.numel) * sizeof(float));
      to += extent.numel;
    }
    TESSERA_RETURN_IF_ERROR(group.all_reduce(label, first_, DType::kF32, first_, size(layout_.first_numel())).wait());
    const float* from = first_ + layout_.plain_begin();
    for (const Extent extent : layout_.plain()) {
      std::memcpy(data + extent.offset, from, size(extent.numel) * sizeof(float));
      from += extent.numel;
    }
    for (const FactoredTensor& tensor : layout_.tensors()) {
      const LowRankShape shape = low_rank(tensor.shape, rank_);
      orthonormalize(first_ + tensor.left, shape.rank, shape.rows);
      project_back(kept_ + tensor.kept, first_ + tensor.left, right_ + tensor.right, shape);
    }
    TESSERA_RETURN_IF_ERROR(group.all_reduce(label, right_, DType::kF32, right_, size(layout_.second_numel())).wait());
    const float share = 1.0f / static_cast<float>(group.size());
    for (const FactoredTensor& tensor : layout_.tensors()) {
      expand(first_ + tensor.left, right_ + tensor.right, share, data + tensor.offset, kept_ + tensor.kept,
             low_rank(tensor.shape, rank_));
    }
    return absl::OkStatus();
  }
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    for (const FactoredTensor& tensor : layout_.tensors()) {
      kept.residuals.push_back({&group,
                                KeptGradients::What::kContributions,
                                {tensor.offset, tensor.shape.rows * tensor.shape.columns},
                                kept_ + tensor.kept});
      kept.factors.push_back({&group, tensor.tensor, {right_ + tensor.right, size(rank_ * tensor.shape.columns)}});
    }
  }

 private:
  const FactorLayout layout_;
  const std::int64_t rank_;
  std::vector<std::int64_t> numbers_;  ///< the entry of MethodSite::numbers for each factored tensor
  float* const kept_;
  float* const right_;
  float* const first_;
};

}  // namespace

MethodLayout layout_of(const PowerSgdConfig& method, const GroupShape& group, int) {
  const FactorLayout factors(group, method.rank);
  if (factors.tensors().empty()) return {};
  return {{factors.second_begin() + in_lines(factors.second_numel()), in_lines(factors.first_numel())},
          {{Exchange::kAllReduce, factors.first_numel()}, {Exchange::kAllReduce, factors.second_numel()}}};
}

MadeMethod make_method(const PowerSgdConfig& method, const MethodSite& at) {
  return std::make_unique<PowerSgd>(at, method.rank);
}

}  // namespace tessera
