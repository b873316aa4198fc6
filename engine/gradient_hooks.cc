#include "engine/gradient_hooks.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <string>

#include "runtime/base/log.h"
#include "sharding/scalar_type.h"
#include "sharding/storage_access.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

/// Engines whose backward is running now, in this process. A gradient that reaches a parameter of another Engine then
/// belongs to a program that trains one module through another, as a GAN does.
std::atomic<int> backwards_of_engines = 0;

/// A tensor like the parameter, whose memory does not exist: reading it throws `text`.
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
         " belongs to the Engine, which took it as backward made it. hint: engine.step() updates the parameters, "
         "\"gradient_clipping\" in the strategy clips, StepResult::grad_norm is the norm; neither a torch::optim "
         "optimizer nor clip_grad_norm_ is needed";
}

std::string text_of_dropped(const std::string& name) {
  return "the gradient of " + name +
         " was dropped: it came from a backward that was not the Engine's. hint: to train, call engine.backward(loss) "
         "and engine.step() in place of loss.backward() and a torch::optim optimizer's step()";
}

}  // namespace

struct GradientHooks::AfterAccumulation : autograd::PostAccumulateGradHook {
  AfterAccumulation(GradientHooks& hooks, Watched& watched) : hooks(hooks), watched(watched) {}
  void operator()(const autograd::Variable&) override { hooks.receive(watched); }

  GradientHooks& hooks;
  Watched& watched;
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
      watched.before_hook = tensor.register_hook([this, &watched](const at::Tensor&) { lift(watched); });
      autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<AfterAccumulation>(*this, watched));
    }
  });
}

GradientHooks::~GradientHooks() {
  for (Watched& watched : watched_) {
    const at::Tensor& tensor = watched.flat().tensor;
    autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
    tensor.remove_hook(watched.before_hook);
    at::Tensor& gradient = tensor.mutable_grad();
    if (watched.is_stand_in(gradient)) gradient.reset();
  }
}

GradientHooks::Taking::Taking(GradientHooks& hooks, at::Tensor factor) : hooks_(hooks) {
  ++backwards_of_engines;
  hooks_.taking_ = true;
  hooks_.factor_ = std::move(factor);
}

GradientHooks::Taking::~Taking() {
  hooks_.taking_ = false;
  hooks_.factor_.reset();
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
    if (factor_.defined()) {
      const Unrecorded unrecorded;
      gradient.mul_(factor_);
    }
    reducer_.take(*watched.group, watched.parameter);
    watched.counts = true;
    if (!watched.taken.defined()) {
      watched.taken = make_stand_in(watched.flat(), *watched.group, text_of_taken(watched.flat().name));
    }
    gradient = watched.taken;
    return;
  }
  gradient.reset();
  if (watched.counts) {  // in mid-step: what counts goes on to count
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
              "; such gradients are dropped and train nothing. hint: call engine.backward(loss) in place of "
              "loss.backward(); to train several Engines with one loss, call tessera::backward(loss, {&a, &b})");
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
            " after a backward of the Engine and before its step, which plain LibTorch would train with. hint: "
            "engine.zero_grad() drops the microbatches begun; gradients change through hooks on tensors, not in .grad");
  }
}

void GradientHooks::begin_step() {
  for (Watched& watched : watched_) watched.counts = watched.is_lifted = false;
}

}  // namespace tessera
