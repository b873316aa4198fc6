#pragma once

// See docs/glossary.md: agreement, unit.

#include <cstdint>
#include <optional>
#include <span>

#include "engine/memory/state_views.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/layer_norms.h"
#include "engine/step/rules/layerwise_rule.h"

namespace tessera {

/// The updates of LAMB and LARS. The class Update goes over all runs twice, and between the two passes ranks agree on
/// each parameter's norms. In backward this is done unit by unit. Ranks do not know the norms of gradients in backward,
/// so lars measures them too.
class LayerwiseUpdate {
 public:
  explicit LayerwiseUpdate(const StepContext& context);

  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options) { rule_.follow(options); }

  /// Begins the first pass over a group. `measure` is then called for the group's slices in order.
  void begin(const FlatGroup& group) { norms_.begin(group); }
  /// `config`: FlatParameter::group of the slice's parameters. If the rule is lamb, it writes directions over the
  /// gradients.
  void measure(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars, std::size_t config);

  /// Agrees on the norms of all units. In backward it agrees only on the norms of `unit`. It is collective. `squares`:
  /// AgreedStep::squares, which are not known in backward. `gradient_scale`: the factor by which sums become mean
  /// gradients. Throws tessera::Error.
  void agree(std::optional<std::int32_t> unit, std::span<const double> squares, double gradient_scale);

  /// Makes the second pass. `scalars.lr`: the rate before norms change it.
  void step(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars, std::size_t config) const;

  /// Returns the seconds spent on agreements so far.
  double seconds() const { return norms_.seconds(); }

 private:
  double norm_of_update(std::size_t config, std::int64_t number) const;

  LayerwiseRule rule_;
  const bool in_backward_;
  LayerNorms norms_;
  std::span<const double> squares_;
  double gradient_scale_ = 1;
};

}  // namespace tessera
