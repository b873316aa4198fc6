#include "engine/autograd/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/autograd/end_of_backward.h"
#include "runtime/torch/autograd_node.h"
#include "sharding/unit.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

thread_local std::vector<std::weak_ptr<SavedTensorHooks>> hooks_of_thread;
thread_local std::vector<SavedTensorHooks*> scopes_of_thread;

/// Returns this thread's latest hooks that still exist, or null.
std::shared_ptr<SavedTensorHooks> current_hooks() {
  while (!hooks_of_thread.empty()) {
    if (auto hooks = hooks_of_thread.back().lock()) return hooks;
    hooks_of_thread.pop_back();
  }
  return nullptr;
}

/// Hooks of a Python program. Autograd calls them inside the operator that saves a tensor. This operator has pinned the
/// tensor's unit. The result of the hooks is kept after the operator has ended. So hooks that pack a tensor may read a
/// parameter only with operators.
class HooksOfProgram final : public autograd::SavedVariableHooks {
 public:
  explicit HooksOfProgram(std::unique_ptr<autograd::SavedVariableHooks> inner) : inner_(std::move(inner)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    std::optional<Unit::HiddenPins> hidden;
    if (Unit* const unit = unit_of(tensor)) hidden.emplace(*unit);
    inner_->call_pack_hook(tensor);
  }
  at::Tensor call_unpack_hook() override { return inner_->call_unpack_hook(); }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return inner_->retrieve_unpack_hook_data();
  }
#if TESSERA_TORCH_TELLS_UNPACK_HOOK
  std::optional<c10::SafePyObject> retrieve_unpack_hook() const override { return inner_->retrieve_unpack_hook(); }
#endif

 private:
  const std::unique_ptr<autograd::SavedVariableHooks> inner_;
};

class HookingEngine final : public autograd::Engine {
 public:
  explicit HookingEngine(autograd::Engine& inner) : inner_(inner) {}

  autograd::variable_list execute(const autograd::edge_list& roots, const autograd::variable_list& inputs,
                                  bool keep_graph, bool create_graph, bool accumulate_grad,
                                  const autograd::edge_list& outputs) override {
    std::optional<InnerBackward> nested;
    if (autograd::get_current_graph_task_id() != -1) nested.emplace();
    return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<autograd::GraphTask>& task,
                                                                 NodePtr root, autograd::InputBuffer&& input) override {
    return inner_.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override { return inner_.make_anomaly_metadata(); }

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (!scopes_of_thread.empty()) return scopes_of_thread.back()->make();
    if (auto others = inner_.get_default_saved_variable_hooks())
      return std::make_unique<HooksOfProgram>(std::move(others));
    if (hooks_of_thread.empty() || autograd::get_current_graph_task_id() != -1) return nullptr;
    const std::shared_ptr<SavedTensorHooks> hooks = current_hooks();
    return hooks ? hooks->make() : nullptr;
  }

 private:
  autograd::Engine& inner_;
};

HookingEngine* hooking_engine = nullptr;  // never destroyed: LibTorch may use it until the process ends
autograd::Engine& engine_with_hooks() { return *hooking_engine; }

}  // namespace

void put_engine_in_place() {
  static std::once_flag once;
  std::call_once(once, [] {
    hooking_engine = new HookingEngine(autograd::Engine::get_default_engine());
    autograd::set_default_engine_stub(&engine_with_hooks);
  });
}

void hook_saved_tensors(const std::shared_ptr<SavedTensorHooks>& hooks) {
  put_engine_in_place();
  const auto are_these = [&](const std::weak_ptr<SavedTensorHooks>& each) { return each.lock() == hooks; };
  if (std::ranges::none_of(hooks_of_thread, are_these)) hooks_of_thread.emplace_back(hooks);
}

SavedTensorScope::SavedTensorScope(SavedTensorHooks& hooks) {
  put_engine_in_place();
  scopes_of_thread.push_back(&hooks);
}

SavedTensorScope::~SavedTensorScope() { scopes_of_thread.pop_back(); }

}  // namespace tessera
