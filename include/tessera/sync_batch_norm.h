#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <iosfwd>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/mesh.h"

namespace tessera {

/// Batch normalisation over the samples of all ranks (Ioffe and Szegedy, arXiv 1502.03167). The input is [B, C], [B, C,
/// L], [B, C, H, W] or [B, C, D, H, W] of a floating-point dtype. B may differ between ranks, and may be 0 on some
/// ranks.
///
/// * While training, mean and variance are computed over the batches of all ranks together, in forward and in backward.
///   The result is the same as in one process with the concatenated batch. Running statistics are equal on all ranks.
///   They use momentum (nullopt: the plain mean of all batches) and the unbiased variance over the total count, as
///   LibTorch's BatchNorm does.
/// * A module in eval mode computes what LibTorch's BatchNorm computes, and does not communicate.
/// * tessera::checkpoint runs forward twice, but running statistics count each batch once.
///
/// The constructor is collective, and so is each forward and backward while training. These calls use a separate
/// communication group. The operation is not differentiable twice. Parameters and buffers have the names and shapes of
/// BatchNorm, so a file of weights fits either class. Throws tessera::Error (64) on all ranks if all ranks together
/// have only one value per channel, or if a batch does not fit num_features.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// The constructor is collective. `options`: the options of LibTorch's BatchNorm.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const Mesh& mesh);
  /// Returns the normalised input, in its shape and dtype. It is collective while training.
  at::Tensor forward(const at::Tensor& input);
  /// Writes the module's description, as LibTorch's modules do.
  void pretty_print(std::ostream& stream) const override;

 protected:
  /// Throws tessera::Error unless the input has a shape that forward takes.
  void _check_input_dim(const at::Tensor& input) override;

 private:
  Mesh mesh_;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every BatchNorm1d, 2d and 3d in `module` normalise over all ranks, with the rules of SyncBatchNorm. The module
/// objects are not replaced, since a C++ module holds its children by their type. Instead, their operator
/// (aten::batch_norm) uses the statistics of all ranks from now on. Clones of these modules that are made later are not
/// converted. Returns the paths of the converted modules.
///
/// The call is collective. BatchNorm itself refuses a training batch with one value per channel on this rank, before
/// any communication. Throws tessera::Error (64) for a BatchNorm with neither parameters nor running statistics:
/// nothing identifies such a module, so the program must use a SyncBatchNorm instead.
std::vector<std::string> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module, const Mesh& mesh);

/// Converts the module of a ModuleHolder, such as one made by TORCH_MODULE.
template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
std::vector<std::string> convert_sync_batchnorm(const Holder& holder, const Mesh& mesh) {
  return convert_sync_batchnorm(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), mesh);
}

}  // namespace tessera
