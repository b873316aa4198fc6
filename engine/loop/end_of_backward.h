#pragma once

#include <functional>

namespace tessera {

/// Runs `callback` when the backward that is running on this thread ends, and with it all backwards around it (those of
/// checkpoint() run inside another). What it throws leaves that backward. REQUIRES: a backward is running.
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
