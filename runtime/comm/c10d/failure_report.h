#pragma once

#include <absl/status/status.h>

#include <memory>
#include <string>

#include "runtime/comm/call.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// How the ranks of a group that has no shared memory tell each other why they failed: through the store.
/// Nothing is written while all goes well, except, once, that a rank has come. Thread-safe.
///
/// The store may hang with the rank that serves it, so it is talked to on a thread of its own, which is left
/// behind after two seconds without an answer.
class FailureReport {
 public:
  FailureReport(const Group& group, std::shared_ptr<KeyValueStore> store);
  ~FailureReport();

  /// This rank connects to the others.
  void publish_arrival();
  /// The error of this rank, which could not: `why`, and the ranks that have not come, or do not say that they failed too. Exit code
  /// 75. Needs some seconds; the rank that serves the store stays until the others have asked.
  absl::Status explain_arrival(const std::string& why);

  /// This rank failed in `call`, or gave up for `reason`. The first counts.
  void publish_call(const CallSignature& call);
  void publish_reason(const absl::Status& reason);

  /// Empty, or the news that another rank has published a failure. It asks the store, so it is not for every call. If the
  /// store does not answer, that is no news: the rank that serves it may have ended before the others.
  std::string news();

  /// The error of this rank's failed `call`: `why`, and what every other rank says within a second or so.
  /// Exit code 70 if another rank was in a different call of the same number, 65 if one has ended its program
  /// (MeshGroups::leave), else 75. Where the store is gone, its server is named, and no other rank.
  absl::Status explain(const CallSignature& call, const std::string& why);

 private:
  void publish(const std::string& text);
  /// Fills in `answers`, as far as the store tells. False: it does not answer.
  struct Answers;
  bool ask_all(const std::shared_ptr<Answers>& answers);
  std::string silent_server() const;
  std::string gone_server() const;

  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace tessera
