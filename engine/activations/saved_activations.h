#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "engine/activations/activation_tier.h"
#include "engine/autograd/saved_tensor_hooks.h"

namespace tessera {

/// Which tensors are offloaded.
struct SavedActivationsOptions {
  c10::Device device = c10::Device(c10::kCPU);
  std::size_t min_bytes = 1;
  /// Storages that live anyway, such as those of a module's buffers.
  std::vector<c10::Storage> staying = {};
};

/// Saves tensors for backward on a tier, for the operators of the threads that `hook_saved_tensors` is called on.
///
/// | a tensor that autograd saves | is |
/// |---|---|
/// | of a unit of an Engine that lives, or a leaf that needs gradients | kept: its storage is released and filled by others |
/// | of storages that live anyway; of other devices, layouts or subclasses | kept |
/// | that uses less than a quarter of its storage, in pieces with gaps | kept |
/// | of fewer than `min_bytes` | kept |
/// | dense | put, its own bytes |
/// | with gaps | put, with all of its storage, so that its neighbours (the parts of a fused projection) find themselves in it |
///
/// 1. What is kept is held as LibTorch holds it. What is put is not held, so its memory goes with the last other holder.
/// 2. Bytes that are put already, of the same storage at the same version, are not put again.
/// 3. Backward gets sizes, strides and values of the time of saving. Where the tensor was written in place since, it gets
///    LibTorch's error, whether the tensor was kept or put.
/// 4. A storage that still lives when backward wants it is used as it is; several tensors that were saved in one share it
///    again. The two that were brought back last are held until others are, or the graph lets go of them.
/// 5. Bytes are dropped when the graph lets go of the last tensor in them. A graph may outlive this object.
class SavedActivations final : public SavedTensorHooks {
 public:
  SavedActivations(std::unique_ptr<ActivationTier> tier, SavedActivationsOptions options);
  /// Nothing is saved here from now on. What was saved stays for its graphs.
  ~SavedActivations() override;

  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override;
  /// This process was forked from the one that trains, and shares its transfers: from now on nothing is put or dropped, and what was
  /// put is a c10::Error to whoever wants it.
  void enter_forked_process();
  ActivationCounts counts() const;
  std::int64_t memory_bytes() const;

  class Store;

 private:
  const std::shared_ptr<Store> store_;
};

}  // namespace tessera
