#pragma once

#include <memory>
#include <vector>

#include "sharding/reducer.h"
#include "sharding/unit.h"

namespace tessera {

/// While it lives, backward hands each trainable parameter's gradient to the reducer as soon as it is complete
/// (autograd's post-accumulate hook), and the parameter's `.grad` is empty again.
class GradientHooks {
 public:
  GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  const std::vector<std::unique_ptr<Unit>>& units_;
};

}  // namespace tessera
