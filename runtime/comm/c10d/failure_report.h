#pragma once

#include <absl/status/status.h>

#include <memory>
#include <string>

#include "runtime/comm/call.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// Lets the ranks of a group without shared memory tell each other, through the store, why they failed. A rank writes
/// nothing while all goes well, except once, when it has arrived. This class is thread-safe.
///
/// The store may hang with the rank that serves it. A separate thread therefore talks to the store. If the store does
/// not answer for two seconds, the rank no longer waits for this thread.
class FailureReport {
 public:
  FailureReport(const Group& group, std::shared_ptr<KeyValueStore> store);
  ~FailureReport();

  /// Writes to the store that this rank begins to connect to the other ranks.
  void publish_arrival();
  /// Returns the error of this rank, which could not connect. The text has `why`, and names the ranks that have not
  /// arrived. If all have arrived, it names the ranks that have published no failure. The exit code is 75. The call
  /// takes some seconds. The rank that serves the store stays until the other ranks have asked.
  absl::Status explain_arrival(const std::string& why);

  /// Publishes that this rank failed in `call`, or gave up for `reason`. Only the first failure is published.
  void publish_call(const CallSignature& call);
  void publish_reason(const absl::Status& reason);

  /// Returns whether another rank of the group has published a failure, or its process is gone. The process counts as
  /// gone if it was seen to end without MeshGroups::leave, or if it served the store and the store is gone.
  bool is_left_alone(Collectives::HasKey has_key) const;
  /// Returns a text if another rank has published a failure, or else "". It asks the store, so do not use it for every
  /// call. If the store does not answer, the result is "" too: the rank that serves the store may end before the other
  /// ranks, without a failure.
  std::string news();

  /// Returns the error of this rank's failed `call`: `why`, and the failure that each other rank publishes within a
  /// second or so. The exit code is 70 if another rank was in a different call of the same number, or else 75. If the
  /// store is gone, the message names the rank that served it, and not the ranks that do not answer.
  absl::Status explain(const CallSignature& call, const std::string& why);

 private:
  void publish(const std::string& text);
  /// Fills in `answers`, as far as the store has them. Returns false if the store does not answer.
  struct Answers;
  bool ask_all(const std::shared_ptr<Answers>& answers);
  std::string silent_server() const;
  std::string gone_server() const;

  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace tessera
