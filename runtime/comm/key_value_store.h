#pragma once

#include <absl/status/statusor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

/// The rendezvous store: a few small strings that all ranks of a job can read. Implemented over c10d's TCPStore
/// (`tcp_store.h`) between processes and by a map inside one process (`memory_store`).
/// Thread-safe. Keys are never deleted while the job runs.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual absl::Status set(const std::string& key, const std::string& value) = 0;
  /// Waits until `key` exists. DeadlineExceeded (exit code 75) after `timeout`.
  virtual absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// True if `key` exists now.
  virtual absl::StatusOr<bool> has(const std::string& key) = 0;
  /// Adds to a counter (absent counts as 0) and returns the new value.
  virtual absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) = 0;

  /// The same store over a connection of its own, where one connection answers one question after another: then whoever waits in this one
  /// is in nobody's way there. Null: this one is no worse, or there is none to be had. Asks the server.
  virtual std::shared_ptr<KeyValueStore> connected_anew() { return nullptr; }

  /// Questions that nobody waits for any more, since the server did not answer in time (ask_in_time).
  std::atomic<int> unanswered = 0;
};

/// A store inside this process, for ranks on threads.
std::shared_ptr<KeyValueStore> memory_store();

/// `store` with `prefix` put before every key, so that groups cannot meet each other's keys.
std::shared_ptr<KeyValueStore> prefix_store(std::string prefix, std::shared_ptr<KeyValueStore> store);

}  // namespace tessera
