#include "engine/loop/recorded_norms.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>

#include <unordered_map>

#include "engine/loop/recomputing.h"
#include "runtime/base/mutex.h"

namespace tessera {
namespace {

/// The recorded norms of the process, by their running means. Ranks that are threads share the list.
class RecordedNorms {
 public:
  static RecordedNorms& all() {
    static RecordedNorms* const norms = new RecordedNorms;  // never destroyed: forwards may run until the exit
    return *norms;
  }

  void add(const std::shared_ptr<RecordedNorm>& norm) {
    const MutexLock lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    entries_.insert_or_assign(norm->mean.unsafeGetTensorImpl(), norm);
  }

  /// A living norm keeps its tensor alive, so the address belongs to no other tensor.
  std::shared_ptr<RecordedNorm> find(const at::TensorImpl* mean) {
    const MutexLock lock(mutex_);
    const auto found = entries_.find(mean);
    return found == entries_.end() ? nullptr : found->second.lock();
  }

 private:
  Mutex mutex_;
  std::unordered_map<const at::TensorImpl*, std::weak_ptr<RecordedNorm>> entries_ ABSL_GUARDED_BY(mutex_);
};

template <class Norm>
std::optional<bool> cumulative_as(const torch::nn::Module& module) {
  const auto* const norm = module.as<Norm>();
  return norm ? std::optional<bool>(!norm->options.momentum().has_value()) : std::nullopt;
}

}  // namespace

std::optional<bool> batch_norm_is_cumulative(const torch::nn::Module& module) {
  if (is_norm_of_ranks(module)) return std::nullopt;
  if (const auto* const view = dynamic_cast<const NormView*>(&module)) return view->is_cumulative();
  if (const auto found = cumulative_as<torch::nn::BatchNorm1dImpl>(module)) return found;
  if (const auto found = cumulative_as<torch::nn::BatchNorm2dImpl>(module)) return found;
  return cumulative_as<torch::nn::BatchNorm3dImpl>(module);
}

RecordedNorm::Target RecordedNorm::begin_forward(double momentum) {
  if (is_in_backward || Recomputing::now()) return {at::zeros_like(mean), at::zeros_like(variance), 1.0};
  if (!batches_before.defined() && batches.defined()) batches_before = batches.sub(1);
  // A graph may still hold the tensors of an earlier microbatch, so each microbatch has new ones.
  if (change.forwards == 0) change = {at::zeros_like(mean), at::zeros_like(variance)};
  ++change.forwards;
  if (is_cumulative) return {change.mean, change.variance, 1.0 / static_cast<double>(change.forwards)};
  change.keep *= 1 - momentum;
  return {change.mean, change.variance, momentum};
}

void record_norm(const std::shared_ptr<RecordedNorm>& norm) { RecordedNorms::all().add(norm); }

std::shared_ptr<RecordedNorm> recorded_norm(const std::optional<at::Tensor>& running_mean) {
  if (!running_mean || !running_mean->defined()) return nullptr;
  return RecordedNorms::all().find(running_mean->unsafeGetTensorImpl());
}

}  // namespace tessera
