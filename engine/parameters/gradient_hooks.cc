#include "engine/parameters/gradient_hooks.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/border/phrase.h"
#include "runtime/torch/storage_access.h"
#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

/// The number of Engines in this process whose backward is running now. If a gradient reaches a parameter of another
/// Engine meanwhile, the program trains one module through another, as a GAN does.
std::atomic<int> backwards_of_engines = 0;

/// Makes a tensor of the parameter's shape without memory. Reading this tensor throws an error with the text `text`.
at::Tensor make_stand_in(const FlatParameter& flat, const FlatGroup& group, const std::string& text) {
  const Unrecorded unrecorded;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(flat.numel * group.element_bytes()),
      at::DataPtr(nullptr, group.device), /*allocator=*/nullptr, /*resizable=*/false);
  c10::StorageImpl& impl = *storage;
  const at::Tensor tensor = at::empty({0}, at::TensorOptions(scalar_type_of(group.dtype)).device(group.device))
                                .set_(c10::Storage(std::move(storage)), 0, flat.sizes, flat.strides);
  set_refusal(impl, text);
  refuse_access(impl, true);
  return tensor;
}

std::string text_of_taken(const std::string& name) {
  return "the gradient of " + name +
         " belongs to the Engine, which took it as backward made it. [T0164] hint: engine.step() updates the "
         "parameters, \"gradient_clipping\" in the strategy clips, " +
         say(phrases::kGradNorm) + " is the norm; neither " + say(phrases::kOptimizer) +
         " nor clip_grad_norm_ nor zero_grad(set_to_none=False) is needed";
}

std::string text_of_dropped(const std::string& name) {
  return "the gradient of " + name +
         " was dropped: it came from a backward that was not the Engine's. [T0165] hint: to train, call "
         "engine.backward(loss) and engine.step() in place of loss.backward() and the step() of " +
         say(phrases::kOptimizer);
}

}  // namespace

/// A hook of the node that accumulates the gradient. The hooks of the tensor itself are left to the program; a hook
/// that Python sets there replaces all others.
struct GradientHooks::BeforeAccumulation : autograd::FunctionPreHook {
  BeforeAccumulation(GradientHooks& hooks, Watched& watched) : hooks(hooks), watched(watched) {}
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    hooks.lift(watched);
    return gradients;
  }

  GradientHooks& hooks;
  Watched& watched;
};

struct GradientHooks::AfterAccumulation : autograd::PostAccumulateGradHook {
  AfterAccumulation(GradientHooks& hooks, Watched& watched, std::unique_ptr<PostAccumulateGradHook> programs)
      : hooks(hooks), watched(watched), programs(std::move(programs)) {}
  void operator()(const autograd::Variable& tensor) override {
    if (programs) (*programs)(tensor);
    hooks.receive(watched);
  }

  GradientHooks& hooks;
  Watched& watched;
  /// the program's hook; this hook calls it, since a tensor can have only one post-accumulate hook
  std::unique_ptr<PostAccumulateGradHook> programs;
};

GradientHooks::GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer) : reducer_(reducer) {
  std::size_t count = 0;
  for_each_trainable(units, [&](FlatGroup& group) { count += group.parameters.size(); });
  watched_.reserve(count);
  for_each_trainable(units, [&](FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      Watched& watched = watched_.emplace_back();
      watched.group = &group;
      watched.parameter = i;
      const at::Tensor& tensor = group.parameters[i].tensor;
      tensor.mutable_grad().reset();
      hook_before(watched, autograd::impl::grad_accumulator(tensor));
      auto& hook = autograd::impl::post_acc_grad_hooks(tensor);
      auto after = std::make_unique<AfterAccumulation>(*this, watched, std::move(hook));
      watched.after = after.get();
      autograd::impl::set_post_acc_grad_hooks(tensor, std::move(after));
    }
  });
}

GradientHooks::~GradientHooks() {
  for (Watched& watched : watched_) {
    const at::Tensor& tensor = watched.flat().tensor;
    auto& after = autograd::impl::post_acc_grad_hooks(tensor);
    if (after.get() == watched.after) after = std::move(static_cast<AfterAccumulation&>(*after).programs);
    unhook_before(watched);
    at::Tensor& gradient = tensor.mutable_grad();
    if (watched.is_stand_in(gradient)) gradient.reset();
  }
}

void GradientHooks::hook_before(Watched& watched, NodePtr accumulator) {
  auto before = std::make_unique<BeforeAccumulation>(*this, watched);
  watched.before = before.get();
  watched.accumulator = std::move(accumulator);
  watched.accumulator->add_pre_hook(std::move(before));
}

void GradientHooks::unhook_before(Watched& watched) {
  std::erase_if(watched.accumulator->pre_hooks(),
                [&](const std::unique_ptr<autograd::FunctionPreHook>& hook) { return hook.get() == watched.before; });
}

GradientHooks::Taking::Taking(GradientHooks& hooks, at::Tensor factor, bool counts) : hooks_(hooks) {
  ++backwards_of_engines;
  hooks_.taking_ = true;
  hooks_.factor_ = std::move(factor);
  hooks_.counts_ = counts;
}

GradientHooks::Taking::~Taking() {
  hooks_.taking_ = false;
  hooks_.factor_.reset();
  hooks_.counts_ = true;
  --backwards_of_engines;
}

void GradientHooks::lift(Watched& watched) {
  at::Tensor& gradient = watched.flat().tensor.mutable_grad();
  if (!watched.is_stand_in(gradient)) return;
  gradient.reset();
  watched.is_lifted = true;
}

void GradientHooks::receive(Watched& watched) {
  at::Tensor& gradient = watched.flat().tensor.mutable_grad();
  watched.is_lifted = false;
  if (taking_) {
    if (!gradient.defined()) throw_taken_away(watched);
    if (factor_.defined() && counts_) {
      const Unrecorded unrecorded;
      gradient = gradient.mul(factor_);  // not in place, because two gradients may be views of one tensor
    }
    reducer_.take(*watched.group, watched.parameter, counts_);
    watched.counts = true;
    if (!watched.taken.defined()) {
      watched.taken = make_stand_in(watched.flat(), *watched.group, text_of_taken(watched.flat().name));
    }
    gradient = watched.taken;
    return;
  }
  gradient.reset();
  if (watched.counts) {  // an earlier gradient of the Engine's backward is kept until the step
    gradient = watched.taken;
  } else {
    if (!watched.dropped.defined()) {
      watched.dropped = make_stand_in(watched.flat(), *watched.group, text_of_dropped(watched.flat().name));
    }
    gradient = watched.dropped;
  }
  if (backwards_of_engines == 0) warn_of_foreign_backward(watched);
}

void GradientHooks::warn_of_foreign_backward(const Watched& watched) {
  if (warned_) return;
  warned_ = true;
  log_warning("a backward that is not the Engine's made a gradient of " + watched.flat().name +
              "; such gradients are dropped and train nothing. [T0166] hint: call engine.backward(loss) in place of "
              "loss.backward(); to train several Engines with one loss, call " +
              say(phrases::kBackwardOfSeveral));
}

void GradientHooks::throw_taken_away(const Watched& watched) {
  throw Error(
      ExitCode::kUsage,
      "the gradient of " + watched.flat().name +
          " was cleared by a post-accumulate hook of the program, before the ranks had added it up. [T0167] hint: for "
          "updates in backward set \"optimizer\": {\"in_backward\": true} in the strategy in place of the hook");
}

void GradientHooks::follow() {
  for (Watched& watched : watched_) {
    const at::Tensor& tensor = watched.flat().tensor;
    if (autograd::impl::post_acc_grad_hooks(tensor).get() != watched.after) throw_replaced_hook(watched);
    // If a tensor's data was replaced by data of another dtype, its gradient is accumulated by another node.
    NodePtr accumulator = autograd::impl::try_get_grad_accumulator(tensor);
    if (!accumulator || accumulator == watched.accumulator) continue;
    unhook_before(watched);
    hook_before(watched, std::move(accumulator));
  }
}

void GradientHooks::throw_replaced_hook(const Watched& watched) {
  throw Error(ExitCode::kUsage,
              "a post-accumulate hook was registered on " + watched.flat().name +
                  " after the Engine was made, which takes the place of the Engine's own: its gradients would train "
                  "nothing. [T0168] hint: register it before the Engine is made");
}

void GradientHooks::expect_untouched() const {
  for (const Watched& watched : watched_) {
    if (!watched.counts || watched.is_lifted) continue;
    const at::Tensor& gradient = watched.flat().tensor.grad();
    if (gradient.is_same(watched.taken)) continue;
    const std::string what = gradient.defined() ? "was replaced" : "was cleared (zero_grad?)";
    throw Error(
        ExitCode::kUsage,
        "the gradient of " + watched.flat().name + " " + what +
            " after a backward of the Engine and before its step, which plain LibTorch would train with. [T0169] hint: "
            "engine.zero_grad() drops the microbatches begun; gradients change through hooks on tensors, not in .grad");
  }
}

void GradientHooks::begin_step() {
  for (Watched& watched : watched_) watched.counts = watched.is_lifted = false;
}

}  // namespace tessera
