#pragma once

// See docs/glossary.md: unit.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera {

/// Makes the hooks through which autograd saves a tensor and gets it back.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  /// Returns the hooks of the tensor that is saved next, on the thread whose operator saves it.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

/// Lets `hooks` make the hooks of every tensor that an operator on this thread saves for backward, from now on and
/// while `hooks` lives. If this function was called several times, only the latest hooks are used. Giving the same
/// hooks again changes nothing. Tensors that are saved inside a backward are saved as LibTorch saves them without
/// `hooks`. Recomputation saves such tensors, and so does a backward that will itself be differentiated. Hooks of a
/// Python program (torch.autograd.graph.saved_tensors_hooks) take precedence over `hooks`.
///
/// LibTorch asks its autograd engine for such hooks, so this function calls put_engine_in_place.
void hook_saved_tensors(const std::shared_ptr<SavedTensorHooks>& hooks);

/// While a SavedTensorScope lives, only `hooks` make the hooks of tensors that operators on this thread save, inside a
/// backward too. Scopes nest.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorHooks& hooks);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

/// Replaces the present autograd engine, which is LibTorch's own or that of the Python package torch, by
/// Tessera's own engine. Only the first call in a process does anything. Any thread may call it. Tessera's engine
/// passes all calls on, with three additions. hook_saved_tensors can give the hooks for saved tensors. Hooks of a
/// Python program get no pointer into a unit that only a running operator has pinned (Unit::HiddenPins). A backward
/// that C++ runs inside another one is an InnerBackward (engine/autograd/end_of_backward.h).
void put_engine_in_place();

}  // namespace tessera
