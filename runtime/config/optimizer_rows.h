#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The traits with which a row of TESSERA_OPTIMIZER_TYPES (tessera/optimizer_types.h) says which numbers of
/// OptimizerConfig a rule reads, and how the rule updates parameters.
namespace optimizer_traits {

enum OptimizerTrait : unsigned {
  // The numbers of OptimizerConfig that the rule reads.
  kBetas = 1u << 0,
  kEps = 1u << 1,
  kMomentum = 1u << 2,
  kDampening = 1u << 3,
  kNesterov = 1u << 4,
  kAlpha = 1u << 5,
  kCentered = 1u << 6,
  kLrDecay = 1u << 7,
  kFreezeStep = 1u << 8,
  kTrustCoefficient = 1u << 9,
  // How the rule updates parameters.
  kOnlyMomentum = 1u << 10,   ///< without momentum the rule keeps no state
  kLayers = 1u << 11,         ///< the norms of each parameter adapt its rate
  kGradientNorms = 1u << 12,  ///< with kLayers: the norms are those of the gradient, not of a direction
  kMatrices = 1u << 13,       ///< the rule updates matrices except embeddings; adamw updates all other parameters
  kTensors = 1u << 14,        ///< the rule updates every parameter as a whole tensor
  kTensorStates = 1u << 15,   ///< with kMatrices, kTensors: states are whole tensors (TensorRule::states_of)
  kOwnElements = 1u << 16,    ///< the rule updates element by element, by a formula of the user's program
};

}  // namespace optimizer_traits

/// The values of a rule that a strategy may leave out. They differ between rules or between versions of Tessera.
struct OptimizerDefaults {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  MuonLrAdjustment adjust_lr = MuonLrAdjustment::kOriginal;
};

/// A row of TESSERA_OPTIMIZER_TYPES.
struct OptimizerRow {
  OptimizerType type;
  std::string word;  ///< "adamw"
  std::string text;  ///< text about the type in docs/strategy.md
  unsigned traits;
  OptimizerDefaults defaults;  ///< the defaults of torch.optim, or of timm if PyTorch lacks the rule
};

/// Returns all rows, in their order.
const std::vector<OptimizerRow>& optimizer_rows();

/// Returns whether the rule has one of `traits` (optimizer_traits, joined by |).
bool has(OptimizerType type, unsigned traits);

/// Returns the words of all types that have one of `traits`: "sgd, rmsprop or lars".
std::string types_with(unsigned traits);

/// Returns the defaults of a type. `version` is OptimizerConfig::defaults_version; a version later than this program's
/// version counts as this program's version.
OptimizerDefaults defaults_of(OptimizerType type, std::int64_t version);

/// A key that a strategy leaves out and that had another default in version 1.
struct ChangedDefault {
  std::string key;          ///< "optimizer.weight_decay"
  std::string now, before;  ///< default values as JSON, of this version and of version 1
};

/// Returns the changed keys that the optimizer's rule reads, in the order of docs/strategy.md.
std::vector<ChangedDefault> changed_defaults(const OptimizerConfig& optimizer);

}  // namespace tessera
