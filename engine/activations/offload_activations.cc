#include "engine/activations/offload_activations.h"

#include <utility>

#include "engine/activations/device_activations.h"
#include "engine/activations/nvme_activations.h"

namespace tessera {

std::shared_ptr<SavedActivations> offload_activations(const OffloadConfig& offload, const NamedTensors& whole,
                                                      const Accelerator& accelerator, int rank) {
  if (offload.activations == Tier::kMemory) return nullptr;
  std::unique_ptr<ActivationTier> tier;
  if (offload.activations == Tier::kHost) {
    tier = host_activations(accelerator, offload, rank);
  } else {
    tier = accelerator.device.is_queued ? device_nvme_activations(accelerator, offload, rank)
                                        : nvme_activations(offload, rank);
  }
  SavedActivationsOptions options;
  options.device = accelerator.device.device;
  options.min_bytes = static_cast<std::size_t>(offload.activations_min_bytes);
  for (const auto& item : whole) {
    if (item.value().has_storage()) options.staying.push_back(item.value().storage());
  }
  auto activations = std::make_shared<SavedActivations>(std::move(tier), std::move(options));
  hook_saved_tensors(activations);
  return activations;
}

}  // namespace tessera
