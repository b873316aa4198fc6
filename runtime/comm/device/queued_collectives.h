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

/// A c10d::Backend that queues its calls on a device, and what c10d::Backend has no word for.
struct QueuedBackend {
  TransportKind kind = TransportKind::kOwn;
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::Device device;
  /// All queued groups of this rank. They all end with the first one that fails.
  std::shared_ptr<QueuedGroups> groups;
  /// See Collectives::allocate. Memory lives on after `release_memory`, but the backend no longer knows it.
  std::function<absl::StatusOr<std::unique_ptr<CommBuffer>>(std::size_t bytes)> allocate;
  std::function<void()> release_memory = [] {};
  /// Writes what the backend recorded of its calls, for after a failure, and says where: "flight record: FILE". May throw.
  std::function<std::string()> write_record = [] { return std::string(); };
  /// Marks where the queue ends now, and returns a function that says whether the device has come to that place.
  std::function<std::function<bool()>()> mark = [] { return [] { return true; }; };
};

/// Collectives whose calls a backend queues on a device; all pointers are the device's.
///
/// Sums are the backend's, in the dtype of the input, widened to fp32 afterwards: their order, and so their bits, are its
/// own. Narrow types are added up in the input. No SumVisitor.
///
/// A call that fails or stands still on the device (WorkWatch) ends this rank's groups: the record is written, peers are
/// told through `store`, and backends are aborted, so that the device goes on and nobody waits for ever. What it computes
/// from then on is worthless, which `status` says. See QueuedGroups::end.
std::shared_ptr<Collectives> queued_collectives(const Group& group, QueuedBackend backend,
                                                std::shared_ptr<KeyValueStore> store);

}  // namespace tessera
