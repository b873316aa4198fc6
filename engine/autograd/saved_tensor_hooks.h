#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera {

/// Makes the hooks through which autograd saves a tensor and gets it back.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  /// For the tensor that is saved next, whichever it is.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

/// From now on, and while it lives, `hooks` makes those of every tensor that an operator on this thread saves for a backward.
/// Of several, the one given last does; giving one again changes nothing. Nothing happens to what is saved inside a backward: recomputation, or a backward that
/// is differentiated itself. Hooks of a Python program (torch.autograd.graph.saved_tensors_hooks) go before ours.
///
/// LibTorch asks its autograd engine for such hooks: calls put_engine_in_place.
void hook_saved_tensors(const std::shared_ptr<SavedTensorHooks>& hooks);

/// While it lives, `hooks` and no others make those of what an operator on this thread saves, inside a backward too. Scopes nest.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorHooks& hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

/// Once a process: puts an autograd engine of ours in the place of the one that is there, LibTorch's own or that of the Python
/// package torch, and passes on to it all but this: hooks for saved tensors come from here, and a backward that C++ runs
/// inside another is an InnerBackward (engine/autograd/end_of_backward.h).
void put_engine_in_place();

}  // namespace tessera
