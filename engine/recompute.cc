#include "tessera/recompute.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/autograd/saved_tensor_hooks.h"
#include "engine/autograd/saved_version.h"
#include "engine/loop/recomputing.h"
#include "runtime/base/mutex.h"
#include "sharding/unit.h"

namespace tessera {

// This file runs a function again in backward, so that the tensors which it saved need not be kept.
//
// A Call is one call of checkpoint(). The first run makes a Hooks object for each saved tensor. The object stores the
// tensor's shape, options and version, and keeps the tensor only if the tensor stays alive anyway. If a node of
// backward needs a tensor that was not kept, it calls `take`. `take` makes the second run if there was none
// (`run_again`). SecondRun collects the tensors that are saved again, and compares each with the same tensor of the
// first run. When the last of them is saved, an exception ends the function (NothingIsMissing).

namespace {

namespace autograd = torch::autograd;

/// The state of each generator that a function of some inputs may draw from: the CPU's generator, and the generators of
/// the inputs' devices. Reading the state of a GPU's generator does not wait for the GPU.
struct RandomStates {
  static RandomStates of(const std::vector<at::Tensor>& inputs) {
    RandomStates states;
    states.add(at::Device(at::kCPU));
    for (const at::Tensor& input : inputs) {
      if (input.defined()) states.add(input.device());
    }
    return states;
  }

  void add(at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    for (const auto& [known, state] : entries) {
      if (known == generator) return;
    }
    entries.emplace_back(generator, generator.get_state());
  }
  RandomStates now() const {
    RandomStates states;
    for (const auto& [generator, state] : entries) states.entries.emplace_back(generator, generator.get_state());
    return states;
  }
  void restore() {
    for (auto& [generator, state] : entries) generator.set_state(state);
  }

  std::vector<std::pair<at::Generator, at::Tensor>> entries;
};

/// Gives the generators the states `states`, and restores their own states at the end of the scope.
class WithRandomStates {
 public:
  explicit WithRandomStates(RandomStates& states) : before_(states.now()) { states.restore(); }
  ~WithRandomStates() { before_.restore(); }
  WithRandomStates(const WithRandomStates&) = delete;
  WithRandomStates& operator=(const WithRandomStates&) = delete;

 private:
  RandomStates before_;
};

/// Turns autocast's cache off while this object lives. Otherwise code after the optimizer's step would get casts of old
/// parameters from the cache. The cache's key is the tensor without its version, and only the program empties the
/// cache, at the end of its autocast region.
class WithoutCachedCasts {
 public:
  WithoutCachedCasts() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WithoutCachedCasts() { at::autocast::set_autocast_cache_enabled(before_); }
  WithoutCachedCasts(const WithoutCachedCasts&) = delete;
  WithoutCachedCasts& operator=(const WithoutCachedCasts&) = delete;

 private:
  const bool before_;
};

/// Ends the second run of a function as soon as backward has the tensors that it needs. It is not derived from
/// std::exception, so a program that catches such exceptions does not catch it.
struct NothingIsMissing {};

/// Returns whether a tensor is kept and not computed again. A tensor is kept if it stays alive in any case, as a
/// parameter does, even if other code releases and fills its storage (as the residency does with units).
bool is_to_be_kept(const at::Tensor& tensor) {
  return (tensor.is_leaf() && tensor.requires_grad()) || unit_of(tensor) != nullptr;
}

std::vector<std::int64_t> sizes_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? std::vector<std::int64_t>() : tensor.sizes().vec();
}

/// One call of checkpoint(); it lives as long as its graph. The graph comes from the first run. The tensors that its
/// operators saved for backward were not kept, except for parameters, which stay alive anyway. When a node first needs
/// a tensor that was not kept, the function runs again until all these tensors were saved once more. Nodes take the
/// tensors away one by one, so memory falls as backward proceeds.
class Call : public SavedTensorHooks, public std::enable_shared_from_this<Call> {
 public:
  Call(TensorFunction function, const std::vector<at::Tensor>& inputs)
      : function_(std::move(function)), random_states_(RandomStates::of(inputs)) {
    for (const at::Tensor& input : inputs) {
      requires_grad_.push_back(input.defined() && input.requires_grad());
      is_leaf_.push_back(!input.defined() || input.is_leaf());
      inputs_.emplace_back(input, /*is_output=*/false);
    }
  }

  std::vector<at::Tensor> first_run(const std::vector<at::Tensor>& inputs) {
    const SavedTensorScope scope(*this);
    return function_(inputs);
  }

  std::unique_ptr<autograd::SavedVariableHooks> make() override;

 private:
  /// A tensor that the first run saved.
  struct Saved {
    bool is_kept = false, requires_grad = false;
    std::vector<std::int64_t> sizes;
    at::TensorOptions options;
    SavedVersion version;

    bool is_like(const at::Tensor& tensor) const {
      return is_kept == is_to_be_kept(tensor) && requires_grad == tensor.requires_grad() &&
             tensor.dtype() == options.dtype() && tensor.device() == options.device() && sizes == sizes_of(tensor);
    }
  };
  /// A tensor that the second run saved, in the place of the same tensor of the first run.
  struct Again {
    at::Tensor tensor;
    SavedVersion version;
  };
  class Hooks;
  class SecondRun;

  std::size_t add(const at::Tensor& tensor) {
    const bool is_kept = is_to_be_kept(tensor);
    if (!is_kept) last_ = saved_.size();
    saved_.push_back({is_kept, tensor.requires_grad(), sizes_of(tensor), tensor.options(), SavedVersion(tensor)});
    return saved_.size() - 1;
  }
  at::Tensor take(std::size_t i);
  void run_again() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const TensorFunction function_;
  const at::ThreadLocalState thread_state_;
  RandomStates random_states_;
  std::vector<autograd::SavedVariable> inputs_;
  std::vector<char> requires_grad_, is_leaf_;  ///< one for each input
  std::vector<Saved> saved_;
  std::size_t last_ = 0;  ///< index in `saved_` of the last tensor that was not kept

  Mutex mutex_;
  std::vector<Again> again_ ABSL_GUARDED_BY(mutex_);  ///< [saved]: tensor of the second run, until a node takes it
  int graph_task_ ABSL_GUARDED_BY(mutex_) = -1;       ///< the backward for which the second run was made
};

/// Packs and unpacks one tensor that the first run saves.
class Call::Hooks final : public autograd::SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<Call> call) : call_(std::move(call)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = call_->add(tensor);
    if (!call_->saved_[index_].is_kept) return;
    kept_ =
        // The copy has no graph, since a tensor that its own graph holds would never be freed.
        tensor.is_leaf() ? tensor : at::Tensor(tensor.tensor_data());
    version_ = call_->saved_[index_].version;
    call_.reset();
  }
  at::Tensor call_unpack_hook() override {
    if (!kept_.defined()) return call_->take(index_);
    version_.expect_unchanged();
    return kept_;
  }

 private:
  std::shared_ptr<Call> call_;  ///< null if the tensor is kept
  std::size_t index_ = 0;
  at::Tensor kept_;
  SavedVersion version_;  ///< version of a tensor that is kept
};

std::unique_ptr<autograd::SavedVariableHooks> Call::make() { return std::make_unique<Hooks>(shared_from_this()); }

/// Collects the tensors that the second run saves.
class Call::SecondRun final : public SavedTensorHooks {
 public:
  explicit SecondRun(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(call.mutex_)
      : call_(call), graph_task_(autograd::get_current_graph_task_id()) {
    call_.again_.assign(call_.saved_.size(), {});
  }

  std::unique_ptr<autograd::SavedVariableHooks> make() override { return std::make_unique<Collector>(*this); }
  /// Returns whether all tensors have been saved again. The function may continue to run after that: it may catch the
  /// exception, or a backward inside it may have saved the last tensor.
  bool is_complete() const { return is_complete_; }

 private:
  /// Keeps a tensor of the second run for the graph that this run makes. That graph is used only if the function itself
  /// calls backward.
  class Collector final : public autograd::SavedVariableHooks {
   public:
    explicit Collector(SecondRun& run) : run_(run) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      const at::NoGradGuard no_grad;
      tensor_ = tensor.is_leaf() ? tensor : tensor.detach();
      run_.add(tensor, tensor_);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    SecondRun& run_;
    at::Tensor tensor_;
  };

  void add(const at::Tensor& tensor, const at::Tensor& without_graph) {
    call_.mutex_.expect_held();  // the thread that began the run holds the mutex
    if (is_complete_) return;
    const std::size_t i = next_++;
    const Saved& saved = call_.saved_[i];
    TORCH_CHECK(saved.is_like(tensor), "checkpoint(): the function saved a tensor of shape ",
                at::IntArrayRef(saved.sizes), ", ", saved.options.dtype(), ", and in its place one of shape ",
                at::IntArrayRef(sizes_of(tensor)), ", ", tensor.dtype(),
                " when it ran again for backward, or one that wants gradients otherwise. It must compute the same both "
                "times. [T0255] hint: it may not depend on state that it changes, nor may parameters be frozen or "
                "unfrozen, or train() and eval() be called, between forward and backward");
    if (!saved.is_kept) call_.again_[i] = {without_graph, SavedVersion(tensor)};
    if (i != call_.last_) return;
    is_complete_ = true;
    // NothingIsMissing is not a std::exception, so it must not pass through a backward that the function itself
    // started.
    if (autograd::get_current_graph_task_id() == graph_task_) throw NothingIsMissing();
  }

  Call& call_;
  const int graph_task_;
  std::size_t next_ = 0;
  bool is_complete_ = false;
};

void Call::run_again() {
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    at::Tensor input = inputs_[i].unpack();
    if (input.defined()) input = input.detach().set_requires_grad(requires_grad_[i] != 0);
    inputs.push_back(std::move(input));
  }
  const at::ThreadLocalStateGuard as_in_forward(thread_state_);
  const at::AutoGradMode with_grad(true);
  // An input that was not a leaf must not become a leaf, since leaves that require gradients are treated as parameters.
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (requires_grad_[i] && !is_leaf_[i]) inputs[i] = inputs[i].view_as(inputs[i]);
  }
  const WithoutCachedCasts fresh_casts;
  const WithRandomStates same_random_numbers(random_states_);
  const Recomputing second_time;
  SecondRun run(*this);
  const SavedTensorScope scope(run);
  try {
    function_(inputs);
  } catch (...) {
    if (!run.is_complete()) throw;
  }
  TORCH_CHECK(run.is_complete(),
              "checkpoint(): the function saved fewer tensors when it ran again for backward than the ", saved_.size(),
              " of its first run. It must compute the same both times. [T0256] hint: it may not depend on state "
              "that it changes");
}

/// Each backward has one second run. If a backward needs a tensor twice, which is rare, there is a further run.
at::Tensor Call::take(std::size_t i) {
  const MutexLock lock(mutex_);
  const int graph_task = autograd::get_current_graph_task_id();
  if (graph_task != graph_task_ || again_.empty() || !again_[i].tensor.defined()) {
    again_.clear();
    run_again();
    graph_task_ = graph_task;
  }
  saved_[i].version.expect_unchanged();
  const Again again = std::exchange(again_[i], {});
  again.version.expect_unchanged();
  return again.tensor;
}

}  // namespace

std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  return std::make_shared<Call>(function, inputs)->first_run(inputs);
}

at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input) {
  const TensorFunction on_list = [function](const std::vector<at::Tensor>& inputs) {
    return std::vector<at::Tensor>{function(inputs.at(0))};
  };
  return checkpoint(on_list, std::vector<at::Tensor>{input}).at(0);
}

}  // namespace tessera
