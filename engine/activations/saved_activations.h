#pragma once

// See docs/glossary.md: tier, unit.

#include <ATen/core/Tensor.h>

#include <memory>

#include "engine/activations/activation_tier.h"
#include "engine/autograd/saved_tensor_hooks.h"
#include "engine/device/accelerator.h"
#include "sharding/whole_tensors.h"
#include "tessera/strategy.h"

namespace tessera {

/// The conditions under which tensors are offloaded.
struct SavedActivationsOptions {
  c10::Device device = c10::Device(c10::kCPU);  ///< tensors of other devices are kept in memory
  std::size_t min_bytes = 1;                    ///< smaller tensors are kept in memory
  /// Storages that stay allocated in any case, such as those of a module's buffers. Their tensors are kept in memory.
  std::vector<c10::Storage> staying = {};
};

/// Saves tensors for backward on a tier: those that operators save on the threads that called `hook_saved_tensors`.
/// LibTorch calls `make` for each saved tensor; any thread may run backward and destroy graphs. A saved tensor is
/// either kept (it stays in memory) or put (bytes of its storage are copied to the tier):
///
/// | a tensor that autograd saves | is |
/// |---|---|
/// | of a living Engine's unit, or a leaf that needs gradients | kept: the Engine or the program frees and fills it |
/// | whose storage stays allocated anyway; of other devices, layouts or subclasses | kept |
/// | that uses less than a quarter of its storage, in pieces with gaps | kept |
/// | of fewer than `min_bytes` | kept |
/// | dense | put: its own bytes |
/// | with gaps | put: all of its storage, so that its neighbours (the parts of a fused projection) lie in it too |
///
/// 1. LibTorch holds a tensor that is kept. This object does not hold a storage whose bytes were put, so the storage's
///    memory is freed with its last holder.
/// 2. Bytes of the same storage at the same version are put once.
/// 3. Backward gets the sizes, strides and values that the tensor had when it was saved. If the tensor was written in
///    place since, backward gets LibTorch's error, whether the tensor was kept or put.
/// 4. A storage that still exists when backward needs it is used as it is. Tensors that shared a storage when they were
///    saved share a storage again. The two storages that were brought back last are held until others are brought back
///    or the graph no longer holds them.
/// 5. Bytes are dropped when the graph no longer holds any tensor in them. A graph may outlive this object.
class SavedActivations final : public SavedTensorHooks {
 public:
  SavedActivations(std::unique_ptr<ActivationTier> tier, SavedActivationsOptions options);
  /// Stops saving. Values that were saved stay until their graphs end. An error of the last transfers is logged.
  ~SavedActivations() override;

  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override;
  /// It is called in a process that was forked from the training process. The transfers belong to the training process.
  /// Nothing is put or dropped after that, and a backward that needs a tensor from the tier gets a c10::Error.
  void enter_forked_process();
  ActivationCounts counts() const;
  std::int64_t memory_bytes() const;

  class Store;

 private:
  const std::shared_ptr<Store> store_;
};

/// Offloads the tensors that operators of the calling thread save from now on, as `"offload.activations"` says. The
/// Engine calls it when the Engine is made, and holds the returned object, which is null if activations stay in memory.
/// The tensors of `whole` are not offloaded. Throws the tessera::Errors of Spill::create.
std::shared_ptr<SavedActivations> offload_activations(const OffloadConfig& offload, const NamedTensors& whole,
                                                      const Accelerator& accelerator, int rank);

}  // namespace tessera
