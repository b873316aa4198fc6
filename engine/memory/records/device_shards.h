#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/memory/records/state_records.h"
#include "offload/files/aligned_memory.h"
#include "optim/device_kernels.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/shard_source.h"
#include "sharding/unit.h"

namespace tessera {

/// Brings shards to a GPU from their records (FlatGroup::parameters_below) in its host's memory or in files, and what of them is in its own
/// memory from there.
///
/// Records in the host's memory are copied by a queue of their own as soon as a gather begins: no call waits for the device. Those in files
/// are read into pinned memory first, a piece for each unit that may be on its way; `finish` waits for the disk, and queues the copy.
/// Either way the copy waits for what is on the current stream when the gather begins, which may read what the slot held, or change the
/// records; and what is queued behind `finish` waits for the copy.
class DeviceShards final : public ShardSource {
 public:
  /// `kernels` outlive this. `rank`: for errors.
  DeviceShards(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
               std::shared_ptr<StateRecords> records, DeviceKernels& kernels, int rank);
  /// Waits for the copies under way; a failure is logged.
  ~DeviceShards() override;

  void start(const FlatGroup& group, std::byte* memory) override;
  void finish(const Unit& unit) override;
  std::int64_t uploaded_bytes() const override { return uploaded_bytes_; }
  std::int64_t pinned_bytes() const override { return pinned_bytes_; }

 private:
  using Mark = DeviceKernels::Mark;
  /// Pinned memory for the parts of one unit that lie in files.
  struct Piece {
    std::shared_ptr<std::byte> memory;
    std::shared_ptr<Mark> copied;  ///< of what it last held; null: nothing reads it
    bool is_taken = false;
  };
  /// A unit's parts on their way.
  struct Coming {
    std::vector<std::unique_ptr<Mark>> copies;        ///< of what lies in the host's memory
    std::shared_ptr<Mark> begun;                      ///< the slot is free
    std::vector<DeviceKernels::UploadPiece> uploads;  ///< of what comes from files
    std::size_t piece = 0, used = 0;                  ///< of `pieces_`, where there are uploads; bytes of it
  };

  Coming& coming(const Unit& unit) { return coming_[static_cast<std::size_t>(unit.index)]; }
  void settle();
  void read(const FlatGroup& group, std::byte* memory);
  std::size_t take_piece();

  const std::shared_ptr<StateRecords> records_;
  DeviceKernels& kernels_;
  const AlignedMemory::Give take_memory_;
  const bool are_in_files_;
  const std::size_t piece_bytes_;
  std::vector<Coming> coming_;  ///< by unit
  std::vector<Piece> pieces_;
  std::vector<std::byte*> places_;  ///< of each record, where they stay
  std::shared_ptr<Mark> last_;      ///< the latest copy
  std::int64_t uploaded_bytes_ = 0, pinned_bytes_ = 0;
};

}  // namespace tessera
