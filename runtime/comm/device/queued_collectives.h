#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/comm/collectives.h"
#include "runtime/comm/device/queued_groups.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// A c10d::Backend that queues its calls on a device, together with functions that c10d::Backend lacks.
struct QueuedBackend {
  TransportKind kind = TransportKind::kOwn;
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::Device device;
  /// All queued groups of this rank. They all end when the first of them fails.
  std::shared_ptr<QueuedGroups> groups;
  /// Implements Collectives::allocate. Memory stays valid after `release_memory`, but is then no longer registered with
  /// the backend.
  std::function<absl::StatusOr<std::unique_ptr<CommBuffer>>(std::size_t bytes)> allocate;
  std::function<void()> release_memory = [] {};
  /// Writes the backend's record of its calls after a failure, and returns a text that names the file: "flight record:
  /// FILE". It may throw.
  std::function<std::string()> write_record = [] { return std::string(); };
  /// Records an event at the current end of the queue, and returns a function that returns whether the device has
  /// reached this event.
  std::function<std::function<bool()>()> mark = [] { return [] { return true; }; };
};

/// Returns collectives whose calls a backend queues on a device. All pointers are device memory.
///
/// The backend makes the sums in the dtype of the input, and in an order of its own, so their bits may differ from
/// those of other transports. The sums are widened to fp32 afterwards. Sums of narrow types are made in the memory of
/// the input. SumVisitors are refused.
///
/// A call that fails or hangs on the device (WorkWatch) ends this rank's groups. The flight record is written, peers
/// are told through `store`, and backends are aborted, so that the device continues and no thread waits for ever. The
/// device's results are worthless from then on, and `status` returns the failure. See QueuedGroups::end.
std::shared_ptr<Collectives> queued_collectives(const Group& group, QueuedBackend backend,
                                                std::shared_ptr<KeyValueStore> store);

}  // namespace tessera
