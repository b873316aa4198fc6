#pragma once

#include <absl/status/statusor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

/// The rendezvous store holds a few small strings that all ranks of a job can read. Between processes it is c10d's
/// TCPStore (`tcp_store.h`); inside one process it is a map (`memory_store`). It is thread-safe. Keys are never deleted
/// while the job runs. Errors have exit code 75.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual absl::Status set(const std::string& key, const std::string& value) = 0;
  /// Waits until `key` exists. Error: DeadlineExceeded (exit code 75) after `timeout`.
  virtual absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// Returns whether `key` exists now.
  virtual absl::StatusOr<bool> has(const std::string& key) = 0;
  /// Adds to a counter and returns its new value. A counter that does not exist counts as 0.
  virtual absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) = 0;

  /// Returns the same store over another connection, if a connection answers only one request at a time. A caller that
  /// waits on the new connection then blocks no other caller here. Null means that a new connection would be no better,
  /// or that none can be made. The call sends a request to the server.
  virtual std::shared_ptr<KeyValueStore> connected_anew() { return nullptr; }

  /// Returns the numeric address at which users of the store on other hosts reach this host. It is "" if none is known,
  /// or if all users are in one process.
  virtual std::string own_address() const { return ""; }

  /// Number of requests that no thread waits for any more, since the server did not answer in time (ask_in_time).
  std::atomic<int> unanswered = 0;
};

/// Returns a store inside this process, for ranks that are threads.
std::shared_ptr<KeyValueStore> memory_store();

}  // namespace tessera
