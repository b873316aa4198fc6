#pragma once

#include <functional>

namespace tessera {

/// Runs `callback` when the backward that is running on this thread ends, and with it all backwards around it: a program's operators
/// may run one of their own. What it throws leaves that backward. REQUIRES: a backward is running; before it began,
/// put_engine_in_place was called (engine/autograd/saved_tensor_hooks.h).
void at_end_of_backward(std::function<void()> callback);

/// Around a backward that runs inside another one.
class InnerBackward {
 public:
  InnerBackward();
  ~InnerBackward();
  InnerBackward(const InnerBackward&) = delete;
  InnerBackward& operator=(const InnerBackward&) = delete;
};

}  // namespace tessera
