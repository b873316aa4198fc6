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

/// Batch normalisation over the samples of all ranks (Ioffe and Szegedy, arXiv 1502.03167). Input [B, C], [B, C, L],
/// [B, C, H, W] or [B, C, D, H, W] of a floating point dtype; B may differ between ranks, and be 0 on some.
///
///  * While training, mean and variance are those of the batches of all ranks together, forward and backward, as if one
///    process had the concatenated batch. Running statistics are alike on all ranks: momentum (nullopt: the plain mean of
///    all batches) and the unbiased variance over the total count, as LibTorch's BatchNorm has them.
///  * In eval mode it is LibTorch's BatchNorm, and ranks do not meet.
///  * Under tessera::checkpoint running statistics count each batch once, though forward runs twice.
///
/// Making one, and each forward and backward while training, is collective, over a group of communication of its own. Not
/// differentiable twice. Names and shapes of parameters and buffers are those of BatchNorm, so weights fit both.
/// Errors: 64 on all ranks where they have one value a channel together; or where a batch does not fit num_features.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const Mesh& mesh);
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  Mesh mesh_;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every BatchNorm1d, 2d and 3d in `module` normalise over all ranks, with the rules above. The modules stay the ones
/// that they are, since a C++ module holds its children by their type: from now on their operator (aten::batch_norm) gets
/// the statistics of all ranks. What is cloned from them later is not converted. Returns the paths of what was converted.
///
/// Collective. BatchNorm itself refuses a training batch of one value a channel, before anything is asked of other ranks.
/// Throws tessera::Error (64) for a BatchNorm with neither parameters nor running statistics: it has nothing to be known by,
/// so it must be written as a SyncBatchNorm.
std::vector<std::string> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module, const Mesh& mesh);

/// For a ModuleHolder such as one made by TORCH_MODULE.
template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
std::vector<std::string> convert_sync_batchnorm(const Holder& holder, const Mesh& mesh) {
  return convert_sync_batchnorm(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), mesh);
}

}  // namespace tessera
