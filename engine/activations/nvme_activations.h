#pragma once

// See docs/glossary.md: slot.

#include <map>
#include <memory>

#include "engine/activations/activation_tier.h"
#include "offload/spill.h"
#include "tessera/strategy.h"

namespace tessera {

/// Keeps activations of a CPU in scratch files (`"offload.activations"`: `"nvme"`, on the CPU). `put` copies the bytes
/// into the spill's slots, so the caller may free its memory when `put` returns.
class NvmeActivations final : public ActivationTier {
 public:
  /// Throws the tessera::Errors of Spill::create.
  NvmeActivations(const OffloadConfig& offload, int rank);

  Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) override;
  StoredBytes get(Id id) override;
  void drop(Id id) override;
  ActivationCounts counts() const override;
  std::int64_t memory_bytes() const override { return static_cast<std::int64_t>(spill_->memory_bytes()); }

 private:
  struct Value {
    std::size_t bytes = 0, phase = 0;
  };

  std::unique_ptr<Spill> spill_;
  std::map<Id, Value> values_;
  ActivationCounts counts_;  ///< all counts but those of the disk, which the spill keeps
};

}  // namespace tessera
