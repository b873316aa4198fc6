#pragma once

// See docs/glossary.md: residency, slot, unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/memory/records/device_use.h"
#include "engine/memory/records/part_carrier.h"
#include "engine/memory/records/tier_carrier.h"
#include "offload/files/aligned_memory.h"
#include "optim/device_kernels.h"
#include "sharding/carrier.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Brings shards to a GPU from their records (FlatGroup::parameters_below) in its host's memory or in files; parts that
/// lie in the GPU's own memory are copied within it. The residency calls it when it gathers a unit.
///
/// `announce` and `acquire` work as in PartCarrier; `acquire` also makes work that is queued later wait for the
/// copy. The destructor waits for the copies under way (DeviceUse).
///
/// Records in the host's memory are copied on a separate stream as soon as a gather begins; no call waits for the
/// device. Records in files are first read into pinned memory, which has one piece for each unit that may be under way.
/// `acquire` waits for the disk and queues the copy. Both kinds of copy wait for the work that is on the current stream
/// when the gather begins. That work may read the slot's earlier content, or change the records. Work that is queued
/// after `acquire` waits for the copy.
class DevicePartCarrier final : public PartCarrier {
 public:
  /// `units` and `kernels` must outlive this object. `rank` is named in errors.
  DevicePartCarrier(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                    std::shared_ptr<TierCarrier> records, DeviceKernels& kernels, int rank);

  std::int64_t uploaded_bytes() const override { return uploaded_bytes_; }
  std::int64_t pinned_bytes() const override { return pinned_bytes_; }

 private:
  using Mark = DeviceKernels::Mark;
  /// Pinned memory for the parts of one unit that lie in files.
  struct Piece {
    std::shared_ptr<std::byte> memory;
    std::shared_ptr<Mark> copied;  ///< event of the last copy out of the piece; null: nothing reads the piece
    bool is_taken = false;
  };
  /// The parts of a unit that are being brought to the GPU.
  struct Coming {
    std::vector<std::unique_ptr<Mark>> copies;        ///< copies of records in the host's memory
    std::shared_ptr<Mark> begun;                      ///< mark after which the slot is free
    std::vector<DeviceKernels::UploadPiece> uploads;  ///< copies to queue for parts that come from files
    std::size_t piece = 0, used = 0;  ///< index in `pieces_` of the piece from which `uploads` copy; number of bytes
                                      ///< of the piece that are used
  };

  std::span<std::byte> take(std::int64_t unit, LeaseUse use) override;
  Coming& coming(const Unit& unit) { return coming_[static_cast<std::size_t>(unit.index)]; }
  void settle();
  void start(const FlatGroup& group) override;
  void read(const FlatGroup& group);
  std::size_t take_piece();

  DeviceKernels& kernels_;
  const AlignedMemory::Give take_memory_;
  const bool are_in_files_;
  const std::size_t piece_bytes_;
  std::vector<Coming> coming_;  ///< [unit]
  std::vector<Piece> pieces_;
  std::vector<std::byte*> places_;  ///< [record]: its memory; empty if records lie in files
  std::shared_ptr<Mark> last_;      ///< the latest copy
  std::int64_t uploaded_bytes_ = 0, pinned_bytes_ = 0;
  const DeviceUse ends_;
};

}  // namespace tessera
