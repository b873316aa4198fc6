#pragma once

// See docs/glossary.md: flat group, unit.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <vector>

#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Cuts a module into units. Unit 0 is the root unit, named "(root)". It owns every parameter that no other unit
/// claims, and may be empty. Parameters that `units.ignored` names are in no unit. The other units follow in the order
/// of definition; the name of each unit is its module's path.
///
/// A module becomes a unit if its class is in `units.classes` (without namespace and "Impl"), if its path is in
/// `units.modules`, or if `units.min_numel` chooses it. `units.min_numel` chooses, bottom-up, the smallest modules with
/// at least this number of elements that no unit inside them has claimed. A parameter belongs to the innermost unit
/// that contains it. A tied parameter belongs to the first such unit.
///
/// If `units.bucket_cap_mb` is set, units are buckets instead. Trainable parameters, from the last registered to the
/// first, fill the first bucket up to `units.first_bucket_mb` and the other buckets up to the cap. (A tied parameter is
/// put into one bucket, by its first name.) Sizes are in bytes of the reduce dtype (sharding/layout/buckets.h). The
/// root unit has the frozen parameters. "bucket.0", which backward completes first, is the last unit, since units are
/// reduced in reverse order.
///
/// Floating-point parameters outside of keep_fp32 classes get their dtype from `mixed_precision`. Parameters are put
/// into flat groups by dtype, requires_grad and `is_matrix`. Layouts are packed for `parts` equal parts, which are
/// whole pages if parameters may lie on disk.
///
/// Throws tessera::Error (exit code 78) if names match no module. The error lists all of these names, the classes that
/// exist, and the most similar names.
///
/// `has_master` returns whether a parameter whose dtype is narrower than fp32 also has fp32 values elsewhere. If it
/// has, the fp32 values count as its values. `is_matrix` returns whether a parameter, if it trains, is updated as a
/// matrix or as a whole tensor.
std::vector<std::unique_ptr<Unit>> partition(torch::nn::Module& module, const Strategy& strategy, int parts,
                                             const std::function<bool(const at::Tensor&)>& has_master = nullptr,
                                             const std::function<bool(const FlatParameter&)>& is_matrix = nullptr);

}  // namespace tessera
