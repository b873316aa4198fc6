#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "tessera/comm_hook.h"
#include "tessera/elementwise_optimizer.h"
#include "tessera/matrix_optimizer.h"

namespace tessera {

/// The rules that a program defines itself. If a member is null, Tessera uses the rule that the strategy names.
struct OwnRules {
  std::shared_ptr<const ElementwiseOptimizer> elements = {};  ///< used with optimizer.type "own"
  std::shared_ptr<const MatrixOptimizer> matrices = {};       ///< used with optimizer.type "own_matrix"
  std::shared_ptr<CommHook> comm_hook = {};                   ///< used with compression.method of type hook

  /// Returns an OwnRules with only `rule`, in the member of its type.
  template <class Rule>
  static OwnRules of(std::shared_ptr<Rule> rule) {
    OwnRules rules;
    if constexpr (std::is_convertible_v<Rule*, const ElementwiseOptimizer*>) {
      rules.elements = std::move(rule);
    } else if constexpr (std::is_convertible_v<Rule*, const MatrixOptimizer*>) {
      rules.matrices = std::move(rule);
    } else {
      static_assert(std::is_convertible_v<Rule*, CommHook*>,
                    "an Engine takes an ElementwiseOptimizer, a MatrixOptimizer or a CommHook");
      rules.comm_hook = std::move(rule);
    }
    return rules;
  }
};

}  // namespace tessera
