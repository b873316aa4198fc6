#pragma once

// See docs/glossary.md: flat group, unit.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Cuts a module into units. Unit 0 is the root, named "(root)": it owns every parameter that no other unit claims, and
/// may be empty. Parameters that `units.ignored` names are in no unit. The other units follow in order of definition,
/// each named by its module's path.
///
/// A unit's module is one whose class is in `units.classes` (without namespace and "Impl"), whose path is in
/// `units.modules`, or that `units.min_numel` chooses bottom-up: the smallest modules with at least this number of
/// elements that no unit inside them has claimed. A parameter belongs to the innermost unit around it; a tied one
/// belongs to the first such unit.
///
/// Units are buckets instead if `units.bucket_cap_mb` is set: trainable parameters (a tied one once, by its first
/// name), the last registered first, fill the first bucket up to `units.first_bucket_mb` and the others up to the cap.
/// Sizes are in bytes of the reduce dtype (sharding/layout/buckets.h). The root has the frozen parameters; "bucket.0",
/// which backward completes first, is the last unit, since units are reduced in reverse.
///
/// Parameters get their dtype from `mixed_precision` (floating ones, outside keep_fp32 classes) and their flat groups
/// by dtype, requires_grad and `is_matrix`. Layouts are packed for `parts` equal parts, which are whole pages where
/// parameters may lie on disk.
///
/// Throws tessera::Error (exit code 78) if names match no module. The error lists all of these names, the classes that
/// exist, and the nearest ones.
///
/// `has_master`: whether a parameter that is narrow now has fp32 values elsewhere, which count as its values.
/// `is_matrix`: whether a parameter, if it trains, is updated as a matrix or as a whole tensor.
std::vector<std::unique_ptr<Unit>> partition(torch::nn::Module& module, const Strategy& strategy, int parts,
                                             const std::function<bool(const at::Tensor&)>& has_master = nullptr,
                                             const std::function<bool(const FlatParameter&)>& is_matrix = nullptr);

}  // namespace tessera
