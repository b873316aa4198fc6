#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/c10d/packing.h"
#include "runtime/comm/c10d/transfers.h"
#include "runtime/comm/call.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// The calls of a group over a c10d backend, and how they fail. A Transfers object has the messages of one call, and a
/// Work waits for the call. A failed call publishes its state, and drops the backend so that peers fail too. Every
/// later call then returns the same status.
///
/// C10dCollectives derives from this class, and defines the calls. Any thread may call all functions except `begin`.
class C10dCalls {
 protected:
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  using Start = std::function<void(c10d::Backend&, Transfers&)>;

  C10dCalls(const Group& group, Backend backend, std::shared_ptr<KeyValueStore> store, Transfers::Means means)
      : group_(group),
        name_(backend->getBackendName()),
        means_(means),
        report_(group, std::move(store)),
        backend_(std::move(backend)) {}
  ~C10dCalls() = default;

  /// Numbers a call. Only the thread that makes the group's calls may call it.
  CallSignature begin(Operation operation, std::string_view label, DType dtype, std::size_t count, int root = 0);
  /// Begins a call by calling `start`; the Work waits for the transfers that `start` began.
  Work start(const CallSignature& call, const Start& start);
  /// Ends the group, since the caller's arguments make the call impossible. `why` is the reason.
  Work refuse(const CallSignature& call, const std::string& why);

  /// These functions implement the functions of Collectives that have the same names.
  absl::Status status() const;
  void abort(const absl::Status& reason);
  /// Closes the connections. Peers notice the end of the connections, and find in the store that this rank's program
  /// has ended (MeshGroups::leave).
  void leave();
  bool end_if_left_alone(Collectives::HasKey has_key);

  const Group group_;
  const std::string name_;
  /// the backend's way to communicate: a user's own backend may have collectives only
  const Transfers::Means means_;
  /// Memory for data on the wire. It outlives the backend, whose collective may write there after its call has failed.
  std::vector<std::byte> staging_;

 private:
  class Pending;

  absl::StatusOr<std::pair<Backend, std::shared_ptr<Transfers>>> begin_transfers();
  absl::Status fail(const CallSignature& call, const std::string& why);
  void drop_backend();

  FailureReport report_;
  std::uint64_t sequence_ = 0;
  Mutex in_backend_;          // mutex for Transfers
  PackBuffers pack_buffers_;  // buffers for Transfers
  mutable Mutex mutex_;
  Backend backend_ ABSL_GUARDED_BY(mutex_);
  Backend left_in_use_ ABSL_GUARDED_BY(mutex_);  ///< backend that was dropped while a thread waited for its collective
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Transfers>> under_way_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
