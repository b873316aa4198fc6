#include "engine/loop/recorded_norms.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>

#include <unordered_map>

#include "engine/loop/recomputing.h"
#include "runtime/base/mutex.h"

namespace tessera {
namespace {

/// The norms of the process that are converted or recorded, by the tensor by which an operator's call knows them. Ranks
/// that are threads share the list.
class KnownNorms {
 public:
  static KnownNorms& all() {
    static KnownNorms* const norms = new KnownNorms;  // never destroyed: forwards may run until the exit
    return *norms;
  }

  /// Calls `change(entry)` for the entry of `known_by`, which is made if there is none.
  template <class Change>
  void set(const at::Tensor& known_by, const Change& change) {
    const MutexLock lock(mutex_);
    std::erase_if(entries_, [](const auto& item) {
      return item.second.converted.module.expired() && item.second.recorded.expired();
    });
    const auto at = entries_.try_emplace(known_by.unsafeGetTensorImpl(), known_by).first;
    change(at->second);
  }

  KnownNorm find(const at::Tensor& known_by) {
    const MutexLock lock(mutex_);
    const auto found = entries_.find(known_by.unsafeGetTensorImpl());
    if (found == entries_.end()) return {};
    const Entry& entry = found->second;
    KnownNorm norm{entry.converted.module.lock(), {}, nullptr, entry.recorded.lock()};
    if (norm.module) norm.batches = entry.converted.batches, norm.group = entry.converted.group;
    return norm;
  }

 private:
  struct Entry {
    explicit Entry(const at::Tensor& known_by) : alive(known_by.getIntrusivePtr()) {}

    /// Keeps the tensor's address from being used again, but does not keep the tensor alive.
    c10::weak_intrusive_ptr<at::TensorImpl> alive;
    ConvertedNorm converted;
    std::weak_ptr<RecordedNorm> recorded;
  };
  Mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_ ABSL_GUARDED_BY(mutex_);
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
  // A graph may still hold the tensors of an earlier microbatch, so each microbatch has new tensors.
  if (change.forwards == 0) change = {at::zeros_like(mean), at::zeros_like(variance)};
  ++change.forwards;
  if (is_cumulative) return {change.mean, change.variance, 1.0 / static_cast<double>(change.forwards)};
  change.keep *= 1 - momentum;
  return {change.mean, change.variance, momentum};
}

void record_norm(const std::shared_ptr<RecordedNorm>& norm) {
  KnownNorms::all().set(norm->mean, [&](auto& entry) { entry.recorded = norm; });
}

void add_converted(const at::Tensor& known_by, const ConvertedNorm& norm) {
  KnownNorms::all().set(known_by, [&](auto& entry) { entry.converted = norm; });
}

KnownNorm known_norm(const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& weight) {
  if (running_mean && running_mean->defined()) return KnownNorms::all().find(*running_mean);
  if (weight && weight->defined()) return KnownNorms::all().find(*weight);
  return {};
}

}  // namespace tessera
