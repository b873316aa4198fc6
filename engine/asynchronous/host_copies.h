#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/device/accelerator.h"
#include "optim/device_kernels.h"
#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// This rank's copies of all trainable groups in memory of the host: the fp32 values that the rank has pulled, and the
/// gradients that it pushes. Shards lie in memory of hosts, so pulls, pushes and norms work on these copies, on the CPU
/// and on a GPU. ReplicaSync owns the object; PulledParameters and LoneStep call it.
///
/// | a rank trains on | the copies are                        | they are brought by                     |
/// |------------------|---------------------------------------|-----------------------------------------|
/// | the CPU          | FlatGroup::full, FlatGroup::gradient  | nobody: only the getters do anything    |
/// | a GPU            | pinned memory, from and to which the  | `send` and `fetch`, on queues of their  |
/// |                  | GPU copies                            | own                                     |
///
/// On a GPU, values and gradients are copied while the GPU computes. `send` lets the current stream wait for the
/// values, so operators that are queued later read them; the host waits for nothing. The host waits for gradients when
/// the step needs them. It overwrites values only when their last copy to the GPU has ended (`open`).
class HostCopies {
 public:
  /// `readers`: the ranks that read this rank's gradients in its memory ("sync" backups); null if no rank does. On a
  /// GPU, gradients are copied again, to memory that these ranks map, since pinned memory is this rank's alone. The
  /// constructor is collective over `readers`. `units` and the accelerator's kernels must outlive this object. Throws
  /// tessera::Error (71) if the host has not enough pinned memory.
  HostCopies(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const Accelerator& accelerator,
             int rank, Collectives* readers);
  /// Waits for the copies under way; a failure is logged.
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  /// Returns whether a GPU trains, so that the copies are not the memory of the groups.
  bool are_apart() const { return kernels_ != nullptr; }
  /// Returns the bytes of memory of the copies (OuterNumel::copied_bytes); 0 on the CPU.
  std::int64_t memory_bytes() const { return pinned_.bytes() + shared_.bytes(); }
  /// Returns the distance in bytes between the gradients of a rank and those of the next rank. REQUIRES: `readers`.
  std::int64_t gradient_bytes() const { return gradient_bytes_; }

  /// These return the copies of a trainable group, [layout.numel()].
  std::byte* values(const FlatGroup& group) const { return kernels_ ? entry(group).values : group.full; }
  float* gradient(const FlatGroup& group) const { return kernels_ ? entry(group).gradient : group.gradient; }

  /// Waits until the group's values are no longer read, so that they may be overwritten.
  void open(const FlatGroup& group);
  /// Begins to copy the group's values to the GPU. Work that is queued on the current stream after this call finds the
  /// new values, and the copy waits for the work that was queued before this call.
  void send(const FlatGroup& group);
  /// Copies values of the GPU to the host, and waits for them. `part`: elements of the group.
  void bring(const FlatGroup& group, Extent part);

  /// Forgets which copies of gradients were begun. LoneStep calls this when the last backward of a step begins.
  void forget_gradients();
  /// Begins to copy a unit's gradients, which are on the current stream. It is called again if they have changed.
  void fetch(const Unit& unit);
  /// Waits for the gradients of all units. Gradients that were not fetched since `forget_gradients` are fetched now.
  void await_gradients();

 private:
  using Mark = DeviceKernels::Mark;
  struct Entry {
    const FlatGroup* group = nullptr;  ///< null if the group is frozen
    std::byte* values = nullptr;       ///< pinned memory, as `fetched` is
    float* fetched = nullptr;
    float* gradient = nullptr;  ///< `fetched`, or memory that other ranks read
    bool is_fetched = false;    ///< whether the copy of this step's gradients was begun
    /// the last copies of values to the GPU, and of gradients from it; null if the host has waited for them
    std::unique_ptr<Mark> sent = {}, came = {};
  };

  Entry& entry(const FlatGroup& group) { return entries_[first_of_unit_[group.unit->index] + group.index]; }
  const Entry& entry(const FlatGroup& group) const { return entries_[first_of_unit_[group.unit->index] + group.index]; }
  void fetch(Entry& entry);

  DeviceKernels* const kernels_;  ///< null on the CPU
  std::int64_t gradient_bytes_ = 0;
  Arena pinned_, shared_;
  std::vector<std::size_t> first_of_unit_;
  std::vector<Entry> entries_;  ///< [group, in unit order]; empty on the CPU
};

}  // namespace tessera
