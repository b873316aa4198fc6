#pragma once

#include <functional>

namespace tessera {

/// Runs `callback` once, when the outermost backward that is running on this thread ends. (A program's operator may run
/// a backward of its own inside another one.) An exception of `callback` is thrown out of that backward. REQUIRES: a
/// backward is running, and put_engine_in_place (engine/autograd/saved_tensor_hooks.h) was called before it began.
void at_end_of_backward(std::function<void()> callback);

/// Lives while a backward runs inside another backward on this thread; HookingEngine makes it. The callbacks of
/// at_end_of_backward wait until it is destroyed.
class InnerBackward {
 public:
  InnerBackward();
  ~InnerBackward();
  InnerBackward(const InnerBackward&) = delete;
  InnerBackward& operator=(const InnerBackward&) = delete;
};

}  // namespace tessera
