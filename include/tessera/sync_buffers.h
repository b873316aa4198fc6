#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <type_traits>

#include "tessera/mesh.h"

namespace tessera {

enum class BufferSync {
  kFromRankZero,  ///< every rank gets rank 0's values
  kMean,          ///< the mean over the ranks; of integers and flags, such as num_batches_tracked, rank 0's
};

/// Makes the buffers of `module` alike on all ranks. An Engine does that once, when it is made; afterwards each rank's
/// forward writes its own, so that running statistics of a BatchNorm drift apart. Call it before an evaluation or before
/// the weights are saved, which takes rank 0's; "broadcast_buffers" in the strategy has each step do it, and
/// convert_sync_batchnorm keeps them alike all the time.
///
/// Collective. Throws tessera::Error (64) on all ranks where their buffers have other shapes or dtypes.
void sync_buffers(torch::nn::Module& module, const Mesh& mesh, BufferSync how = BufferSync::kFromRankZero);

/// For a ModuleHolder such as one made by TORCH_MODULE.
template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
void sync_buffers(const Holder& holder, const Mesh& mesh, BufferSync how = BufferSync::kFromRankZero) {
  sync_buffers(static_cast<torch::nn::Module&>(*holder.ptr()), mesh, how);
}

}  // namespace tessera
