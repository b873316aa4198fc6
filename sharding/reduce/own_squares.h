#pragma once

// See docs/glossary.md: unit.

#include <span>
#include <vector>

#include "sharding/reduce/pack/gradient_squares.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/reduce/reduced_unit.h"
#include "sharding/reduce/unit_buckets.h"

namespace tessera {

/// Measures this rank's own gradients before they are summed ("noise_scale"). On the CPU they are measured while they
/// are copied into buckets (GradientPacker), and on a GPU in buckets (GradientSquares). The comments on Reducer's
/// functions with the same names tell when to call each function.
class OwnSquares {
 public:
  /// `units` and `buckets` must outlive this object.
  OwnSquares(const ReduceSetup& setup, std::vector<ReducedUnit>& units, const UnitBuckets& buckets)
      : setup_(setup), units_(units), buckets_(buckets), has_own_(units.size()) {}

  void keep();
  void square_by(GradientSquares& squares) { there_ = &squares; }
  void square(bool on);
  double take(std::span<const int> order);
  /// Begins the next step.
  void reset();

  /// It is called before a unit's reduction begins, since the reduction may change the values in the bucket.
  void before_reduction(const ReducedUnit& unit);
  /// It is called when all gradients of a unit were put into its reduction.
  void after_reduction(const ReducedUnit& unit);

 private:
  void square_there(const ReducedUnit& unit);
  void warn_of_two_parts(const Unit& unit);
  char& has_own(const ReducedUnit& unit) { return has_own_[static_cast<std::size_t>(unit.unit->index)]; }

  const ReduceSetup setup_;
  std::vector<ReducedUnit>& units_;
  const UnitBuckets& buckets_;
  GradientSquares* there_ = nullptr;   ///< set on a GPU
  std::vector<GradientPiece> pieces_;  ///< pieces of a unit, while they are handed to `there_`
  std::vector<char> has_own_;          ///< [unit]: whether the unit's gradients of this microbatch were squared
  double sum_ = 0;                     ///< squared norm of the contributions since the last `take`
  bool is_on_ = false, warned_ = false;
};

}  // namespace tessera
