#include "engine/autograd/end_of_backward.h"

#include <torch/csrc/autograd/engine.h>

#include <exception>
#include <utility>
#include <vector>

namespace tessera {
namespace {

thread_local int inner_backwards = 0;
thread_local std::vector<std::function<void()>> waiting;  // callbacks that wait until inner backwards end

void queue(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace

void at_end_of_backward(std::function<void()> callback) {
  if (inner_backwards > 0) {
    waiting.push_back(std::move(callback));
  } else {
    queue(std::move(callback));
  }
}

InnerBackward::InnerBackward() { ++inner_backwards; }

InnerBackward::~InnerBackward() {
  if (--inner_backwards > 0) return;
  // An exception in the inner backward ends the outer backward too, so the callbacks of the outer one are dropped.
  for (auto& callback : std::exchange(waiting, {})) {
    if (std::uncaught_exceptions() == 0) queue(std::move(callback));
  }
}

}  // namespace tessera
