#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "runtime/comm/collectives.h"
#include "runtime/comm/sum/joined_sum.h"
#include "sharding/layout/plan/sum_counter.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/unit.h"

namespace tessera {

/// Adds the last sum's pieces to the sums that earlier reductions of the step left, if any, and shows the result to
/// `visitor`. It is for sums that the host makes; Reductions has one for each group under way.
class Accumulation final : public SumVisitor {
 public:
  /// The result goes to `place`. `visitor` is null where no piece is visited.
  Accumulation(const FlatGroup& group, GradientVisitor* visitor, float* place)
      : group_(group), visitor_(visitor), place_(place) {}

  /// Says that the last sum is added onto `earlier`; sums that were named first are added first.
  void add_onto(const float* earlier) { earlier_[count_++] = earlier; }
  void add_onto(std::span<const float* const> earlier) {
    for (const float* each : earlier) add_onto(each);
  }
  bool adds() const { return count_ > 0; }
  float* place() const { return place_; }

  void visit(std::size_t offset, const float* values, std::size_t numel) override {
    if (offset == 0) visitor_->begin(group_);
    if (count_ > 0) {
      std::array<const float*, kMost> earlier{};
      std::transform(earlier_.begin(), earlier_.begin() + count_, earlier.begin(),
                     [&](const float* sum) { return sum + offset; });
      joined_sum({earlier.data(), count_}, values, place_ + offset, numel);
      values = place_ + offset;
    }
    visitor_->visit(group_, {values, numel});
  }

 private:
  static constexpr std::size_t kMost = SumCounter::kMostJoined;
  const FlatGroup& group_;
  GradientVisitor* const visitor_;
  float* const place_;
  std::size_t count_ = 0;
  std::array<const float*, kMost> earlier_{};
};

}  // namespace tessera
