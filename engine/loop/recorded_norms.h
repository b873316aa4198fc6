#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tessera/module_view.h"

namespace tessera {

class Collectives;

/// The C++ object for a BatchNorm of Python, whose forward is Python code.
class NormView final : public ModuleView {
 public:
  /// `is_cumulative` is true if the module has no momentum, so that its statistics are the plain mean of all batches.
  NormView(std::string class_name, bool is_cumulative)
      : ModuleView(std::move(class_name)), is_cumulative_(is_cumulative) {}
  bool is_cumulative() const { return is_cumulative_; }

 private:
  bool is_cumulative_;
};

/// Returns nothing unless `module` is a BatchNorm1d, 2d or 3d, of C++ or of Python. If it is, returns whether its
/// statistics are the plain mean of all batches. A norm over all ranks (is_norm_of_ranks) and an InstanceNorm do not
/// count as such modules.
std::optional<bool> batch_norm_is_cumulative(const torch::nn::Module& module);

/// Returns whether `module` normalises over the batches of all ranks: a SyncBatchNorm, or a module that
/// convert_sync_batchnorm has converted.
bool is_norm_of_ranks(const torch::nn::Module& module);

/// The change that the forwards of one microbatch make to the running statistics R of a batch norm. If the norm has a
/// momentum, R becomes keep * R + added. If the norm is cumulative, `added` is the mean over the forwards.
struct NormChange {
  at::Tensor mean, variance;  ///< `added` [C] for running mean and variance; undefined before the first forward
  double keep = 1;            ///< product of 1 - momentum over the forwards
  std::int64_t forwards = 0;
};

/// A batch norm whose forwards in training mode do not write its running statistics. They write the change of the
/// microbatch instead (MicrobatchStatistics). The thread that drives an Engine runs the forwards, and reads the change.
struct RecordedNorm {
  /// The tensors into which a forward writes, and the momentum with which it writes.
  struct Target {
    at::Tensor mean, variance;
    double momentum = 0;
  };
  /// Prepares for a forward. LibTorch's module has counted this forward in `batches` already. A forward that is
  /// computed again for backward must change nothing, so it gets new tensors that are not kept.
  Target begin_forward(double momentum);

  std::string name;                ///< path of the module
  at::Tensor mean, variance;       ///< the module's running_mean and running_var, [C]
  at::Tensor batches;              ///< the module's num_batches_tracked, or undefined
  bool is_cumulative = false;      ///< whether the module has no momentum
  bool is_in_backward = false;     ///< whether forwards are computed again
  NormChange change = {};          ///< change of the microbatch under way
  at::Tensor batches_before = {};  ///< value of `batches` before the step's first forward; undefined before that
};

/// From now on, forwards of the norm in training mode call RecordedNorm::begin_forward, as long as the object lives.
/// Such a forward is recognised by the tensor `mean`. Any thread may call this function.
void record_norm(const std::shared_ptr<RecordedNorm>& norm);

/// A BatchNorm that convert_sync_batchnorm has converted.
struct ConvertedNorm {
  std::weak_ptr<torch::nn::Module> module;
  at::Tensor batches;                  ///< the module's num_batches_tracked, or undefined
  std::shared_ptr<Collectives> group;  ///< the ranks over whose batches it normalises
};

/// From now on, known_norm finds the module by `known_by`: its running mean, else its weight. Any thread may call it.
void add_converted(const at::Tensor& known_by, const ConvertedNorm& norm);

/// What is known about the norm that calls aten::batch_norm.
struct KnownNorm {
  std::shared_ptr<torch::nn::Module> module;  ///< the converted module; null if the norm is not converted
  at::Tensor batches;                         ///< ConvertedNorm::batches
  std::shared_ptr<Collectives> group;         ///< ConvertedNorm::group
  std::shared_ptr<RecordedNorm> recorded;     ///< null if the norm is not recorded
};

/// Returns what is known about the norm with these tensors. One look-up serves both kinds, since each forward in
/// training mode makes it. Any thread may call it.
KnownNorm known_norm(const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& weight);

}  // namespace tessera
