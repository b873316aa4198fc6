#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <type_traits>

#include "tessera/mesh.h"

namespace tessera {

/// The ways in which sync_buffers makes buffers equal.
enum class BufferSync {
  kFromRankZero,  ///< every rank gets the values of rank 0
  kMean,          ///< the mean over the ranks; integers and flags, such as num_batches_tracked, get the values of rank
                  ///< 0
};

/// Makes the buffers of `module` equal on all ranks. An Engine makes its module's buffers equal once, when the Engine
/// is made. Each rank's forward then writes the rank's own buffers, so running statistics of a BatchNorm become
/// different. Call sync_buffers before an evaluation, or before saving weights, which writes the buffers of rank 0.
/// "broadcast_buffers" in the strategy makes the buffers equal in each step, and convert_sync_batchnorm keeps running
/// statistics equal all the time.
///
/// The call is collective. Throws tessera::Error (64) on all ranks if their buffers differ in shape or dtype.
void sync_buffers(torch::nn::Module& module, const Mesh& mesh, BufferSync how = BufferSync::kFromRankZero);

/// Syncs the buffers of a ModuleHolder, such as one made by TORCH_MODULE.
template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
void sync_buffers(const Holder& holder, const Mesh& mesh, BufferSync how = BufferSync::kFromRankZero) {
  sync_buffers(static_cast<torch::nn::Module&>(*holder.ptr()), mesh, how);
}

}  // namespace tessera
