#pragma once

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

/// A module that is only names: parameters and buffers that a program has itself, and computes with in code of its own. An
/// Engine over it trains them like those of any module.
///
///   auto view = std::make_shared<tessera::ModuleView>();
///   view->add_module("layers.0", "Block");                // a class, for units.classes
///   view->add_parameter("layers.0.weight", weight);       // [8, 8], a leaf that requires gradients
///   view->add_buffer("layers.0.scale", scale);
///   tessera::Engine engine(view, strategy, mesh);
///   engine.backward(loss_of(weight, scale));              // any code
///
/// It holds the program's own TensorImpls and has no forward. Units are gathered because operators touch their parameters,
/// whoever calls these. Everything that goes by names (units, groups, set_trainable, save_weights, checkpoints) has the
/// names given here. A tensor under two names is a tied parameter.
///
/// Errors are tessera::Error (64), and then nothing was added.
class ModuleView : public torch::nn::Module {
 public:
  /// `class_name`: of this module, as units.classes knows it.
  explicit ModuleView(std::string class_name = kNoClass);

  /// A module of class `class_name` at `path`, such as "layers.0". Names of tensors make the modules on their way, of class
  /// "Module", so it comes before its tensors. Error where there is something at `path`.
  void add_module(const std::string& path, const std::string& class_name);
  /// One that was put together already. It may stand at several places, and its parameters are tied then.
  void add_module(const std::string& path, const std::shared_ptr<ModuleView>& module);

  /// `tensor` trains if it requires gradients. Error: it is no leaf, not dense, undefined, or another tensor that was added
  /// begins at the same place of the same memory; `path` is taken, or one of its modules is a tensor.
  void add_parameter(const std::string& path, const at::Tensor& tensor);
  /// Likewise. Of any dtype.
  void add_buffer(const std::string& path, const at::Tensor& tensor);

  /// The view of a scripted or traced module, with its names and the classes that were scripted ("Linear", "Block"). Train
  /// with `script.forward`, before which nothing else need be done:
  ///
  ///   torch::jit::Module script = torch::jit::load("model.pt");
  ///   tessera::Engine engine(tessera::ModuleView::of(script), strategy, mesh);
  ///   engine.backward(script.forward({input, target}).toTensor());
  ///
  /// `script` must live as long. Its graph must read the parameters themselves: torch.jit.freeze and
  /// torch.jit.optimize_for_inference make constants of them, and a module without parameters is an Error (64). What the
  /// JIT compiles into a kernel of its own takes memory without an operator; on a GPU switch that off with
  /// `torch::jit::setTensorExprFuserEnabled(false)`, else a sharded parameter is an error there that names its unit. (On a CPU
  /// LibTorch's wheels have no such compiler.) The JIT differentiates a graph as one, so many gradients come at its end at
  /// once, and reductions overlap with less of backward than in eager code.
  static std::shared_ptr<ModuleView> of(const torch::jit::Module& script);

 private:
  static constexpr const char* kNoClass = "Module";
  using Place = std::pair<const void*, std::int64_t>;  ///< a storage, and where in it

  enum class Kind : std::uint8_t { kParameter, kBuffer, kModule };
  struct Held {
    Kind kind;
    ModuleView* module = nullptr;  ///< of kModule
  };
  struct Spot {
    ModuleView* owner = nullptr;
    std::string name;
  };
  /// Where `path` is put. Makes the modules on the way. `what` stands in front of errors.
  Spot make_way(const std::string& what, const std::string& path);
  const Held* find(const std::string& name) const;
  void expect_new_memory(const std::string& what, const at::Tensor& tensor) const;

  std::map<std::string, Held> held_;
  std::map<Place, std::pair<std::string, at::Tensor>> tensors_;  ///< parameters that were added through this module
};

}  // namespace tessera
