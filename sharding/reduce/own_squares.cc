#include "sharding/reduce/own_squares.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/base/log.h"

namespace tessera {

void OwnSquares::keep() {
  for (ReducedUnit& unit : units_) unit.gradients.keep_squares();
}

void OwnSquares::square(bool on) {
  if (on == std::exchange(is_on_, on) || there_) return;
  for (ReducedUnit& unit : units_) unit.gradients.squares(on);
}

double OwnSquares::take(std::span<const int> order) {
  if (there_) {
    const bool takes_sums = setup_.accumulates() && setup_.mesh().world_size() == 1;
    for (const int index : order) {
      if (takes_sums && !has_own(units_[index])) square_there(units_[index]);
    }
    std::ranges::fill(has_own_, 0);
    there_->take();
    return 0;
  }
  if (!setup_.accumulates()) {
    std::ranges::fill(has_own_, 0);
    return std::exchange(sum_, 0.0);
  }
  double sum = 0;
  for (const int index : order) sum += units_[index].gradients.square();
  return sum;
}

void OwnSquares::reset() {
  sum_ = 0;
  if (there_) there_->forget();
  std::ranges::fill(has_own_, 0);
}

void OwnSquares::before_reduction(const ReducedUnit& unit) {
  if (is_on_ && there_ && !setup_.is_alone) square_there(unit);
}

/// Notes that a unit was reduced. If a unit's gradient is reduced in two parts, its norm cannot be computed from the
/// norms of the parts.
void OwnSquares::after_reduction(const ReducedUnit& unit) {
  if (!is_on_ || there_ || setup_.accumulates()) return;
  const double square = unit.gradients.square();
  if (square == 0) return;
  sum_ += has_own(unit) ? std::numeric_limits<double>::quiet_NaN() : square;
  warn_of_two_parts(*unit.unit);
}

/// Makes a GPU square this rank's contribution to a unit, before this contribution is sent to other ranks.
void OwnSquares::square_there(const ReducedUnit& unit) {
  pieces_.clear();
  for (const auto& group : unit.unit->groups) {
    if (group->trainable) unit.gradients.add_pieces(*group, buckets_.of(unit, *group), pieces_);
  }
  if (pieces_.empty()) return;
  there_->add(*unit.unit, pieces_, buckets_.dtype());
  if (setup_.accumulates()) {
    has_own(unit) = 1;
  } else {
    warn_of_two_parts(*unit.unit);
  }
}

/// Notes that the unit has gradients of this microbatch, and warns once if it had gradients before.
void OwnSquares::warn_of_two_parts(const Unit& unit) {
  char& has_own = has_own_[static_cast<std::size_t>(unit.index)];
  if (std::exchange(has_own, 1) == 0 || std::exchange(warned_, true)) return;
  log_warning(
      "unit " + unit.name +
      ": its gradients of one microbatch were reduced in two parts, so \"noise_scale\" cannot measure this "
      "step, nor others like it. [T0835] hint: several ranks measure it with \"gradient_sync\": \"last_microbatch\" "
      "and gradient_accumulation above 1");
}

}  // namespace tessera
