#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace torch::jit {
struct Module;
}

namespace tessera {

/// A module that only names parameters and buffers: the program holds these tensors itself, and computes with them in
/// its own code. An Engine over the view trains them like those of any module.
///
///   auto view = std::make_shared<tessera::ModuleView>();
///   view->add_module("layers.0", "Block");                // a class, for units.classes
///   view->add_parameter("layers.0.weight", weight);       // [8, 8], a leaf that requires gradients
///   view->add_buffer("layers.0.scale", scale);
///   tessera::Engine engine(view, strategy, mesh);
///   engine.backward(loss_of(weight, scale));              // any code
///
/// The view holds the TensorImpls of the program and has no forward. Units are gathered when operators use their
/// parameters, whoever calls the operators. Everything that uses names (units, groups, set_trainable, save_weights,
/// checkpoints) uses the names given here. A tensor with two names is a tied parameter. Add everything before an Engine
/// is made for the view.
///
/// Errors are tessera::Error (64). A call that throws an error adds nothing.
class ModuleView : public torch::nn::Module {
 public:
  /// `class_name`: class of this module, for units.classes.
  explicit ModuleView(std::string class_name = kNoClass);

  /// Adds a module of class `class_name` at `path`, such as "layers.0". Adding a tensor creates the missing modules of
  /// its path, with the class "Module", so add a module before its tensors. Throws Error (64) if something is at `path`
  /// already.
  void add_module(const std::string& path, const std::string& class_name);
  /// Adds a view that was put together already. It may be added at several paths; its parameters are tied then.
  void add_module(const std::string& path, const std::shared_ptr<ModuleView>& module);

  /// Adds a parameter: a dense leaf. It trains if it requires gradients. Throws Error (64) if the tensor is not a leaf,
  /// not dense or not defined, or if another added tensor begins at the same address. Throws Error (64) also if `path`
  /// is taken, or if a module in `path` has the path of a tensor that was added before.
  void add_parameter(const std::string& path, const at::Tensor& tensor);
  /// Adds a buffer, of any dtype. It need not be a leaf, and its memory is not compared. Other errors are those of
  /// add_parameter.
  void add_buffer(const std::string& path, const at::Tensor& tensor);

  /// Returns the view of a scripted or traced module, with its names and the classes that were scripted ("Linear",
  /// "Block"). Train with `script.forward`; no other preparation is needed:
  ///
  ///   torch::jit::Module script = torch::jit::load("model.pt");
  ///   tessera::Engine engine(tessera::ModuleView::of(script), strategy, mesh);
  ///   engine.backward(script.forward({input, target}).toTensor());
  ///
  /// `script` must live as long as the view. Its graph must read the parameters themselves. (torch.jit.freeze and
  /// torch.jit.optimize_for_inference turn parameters into constants; a module without parameters is an Error (64).)
  /// Kernels that the JIT compiles access memory without an operator of LibTorch. If a GPU trains, switch this compiler
  /// off with `torch::jit::setTensorExprFuserEnabled(false)`; otherwise reading a sharded parameter is an error, which
  /// names the parameter's unit. (LibTorch's wheels have no such compiler for the CPU.) The JIT differentiates a graph
  /// as a whole, so many gradients arrive together at its end. Reductions then overlap with less of backward than in
  /// eager code.
  static std::shared_ptr<ModuleView> of(const torch::jit::Module& script);

 private:
  static constexpr const char* kNoClass = "Module";
  using Place = std::pair<const void*, std::int64_t>;  ///< a storage, and an offset into it

  enum class Kind : std::uint8_t { kParameter, kBuffer, kModule };
  struct Held {
    Kind kind;
    ModuleView* module = nullptr;  ///< the module, for kModule
  };
  struct Spot {
    ModuleView* owner = nullptr;
    std::string name;
  };
  /// Finds the module and name for `path`, and makes the modules on the way. Errors begin with `what`.
  Spot make_way(const std::string& what, const std::string& path);
  const Held* find(const std::string& name) const;
  void expect_new_memory(const std::string& what, const at::Tensor& tensor) const;

  std::map<std::string, Held> held_;
  std::map<Place, std::pair<std::string, at::Tensor>> tensors_;  ///< parameters that were added through this module
};

}  // namespace tessera
