#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera::testing {

/// Makes units by hand and gives them memory, as an Engine would. Tests of parts of `sharding` use these units.
///
/// Parameter `i` of unit `u` has the values values_of(u, i) at first, on every rank.
class HandMadeUnits {
 public:
  struct Options {
    std::vector<std::vector<std::vector<std::int64_t>>> sizes;  ///< [unit][parameter]: the sizes of the parameter
    ShardingStrategy strategy = ShardingStrategy::kFullShard;
    std::int64_t prefetch = 1, accumulation = 1;
    DType reduce = DType::kF32;
    GradientSync sync = GradientSync::kEachMicrobatch;
    int replicate = 1;
    bool updates_in_backward = false;
  };

  /// Makes the units. All ranks of the world must make this call.
  HandMadeUnits(const Mesh& mesh, const Options& options);

  const MeshAxes& axes() const { return axes_; }
  const MemoryPlan& plan() const { return plan_; }
  Unit& unit(std::size_t u) { return *units_[u]; }
  FlatGroup& group(std::size_t u) { return *units_[u]->groups[0]; }
  at::Tensor& parameter(std::size_t u, std::size_t i) { return group(u).parameters[i].tensor; }
  std::size_t size() const { return units_.size(); }
  std::vector<Unit*> pointers() const { return pointers_to(units_); }

  static at::Tensor values_of(std::size_t u, std::size_t i, at::IntArrayRef sizes);
  /// Adds `amount` to this rank's part of every parameter.
  void change_shards(float amount);

  Arena slots, buckets, scratch, sums;  ///< the plan's memory, which tests give to other objects

 private:
  void make(std::size_t u, const Options& options);
  void place(FlatGroup& group);

  MeshAxes axes_;
  MemoryPlan plan_;
  std::vector<std::unique_ptr<Unit>> units_;
  Arena parameters_, gradients_;
};

/// Returns options for `count` units, each with a matrix and a bias. The first unit is the root. It is smaller than the
/// other units.
HandMadeUnits::Options some_units(std::size_t count, ShardingStrategy strategy = ShardingStrategy::kFullShard);

}  // namespace tessera::testing
