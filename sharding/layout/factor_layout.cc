#include "sharding/layout/factor_layout.h"

#include <algorithm>
#include <cmath>

#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

bool is_shorter_as_factors(MatrixShape shape, std::int64_t rank) {
  return shape.rows * shape.columns > (shape.rows + shape.columns) * rank;
}

}  // namespace

FactorLayout::FactorLayout(const GroupShape& group, std::int64_t rank) {
  std::int64_t plain = 0;
  for (std::size_t i = 0; i < group.layout.size(); ++i) {
    const Extent extent = group.layout.extent(i);
    const MatrixShape shape = i < group.factored.size() ? group.factored[i] : MatrixShape{};
    if (!is_shorter_as_factors(shape, rank)) {
      plain_.push_back(extent);
      plain += extent.numel;
      continue;
    }
    tensors_.push_back({i, shape, extent.offset, kept_numel_, left_numel_, second_numel_});
    kept_numel_ += extent.numel;
    left_numel_ += shape.rows * rank;
    second_numel_ += shape.columns * rank;
  }
  first_numel_ = left_numel_ + plain;
}

std::int64_t FactorLayout::second_begin() const { return MatrixDeal::in_whole_lines(kept_numel_); }

std::int64_t count_of(const GroupShape& group, double fraction) {
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < group.layout.size(); ++i) numel += group.layout.extent(i).numel;
  return std::clamp<std::int64_t>(std::llround(std::ceil(static_cast<double>(numel) * fraction)), 0, numel);
}

}  // namespace tessera
