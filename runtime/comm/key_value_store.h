#pragma once

#include <absl/status/statusor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

  /// Adds a text without line breaks to a list. A list is a key that exists once it has a text. Only this function and
  /// `listed` use its value. Ranks report to all others through a list: a rank that reads it makes as many requests for
  /// 1000 reports as for two, if the store is a c10d::TCPStore. Other stores need requests for each text.
  virtual absl::Status append(const std::string& list, const std::string& text);
  /// Returns the texts of a list in the order in which they were added. There are none if the list does not exist. A
  /// text that is just being added may be missing.
  virtual absl::StatusOr<std::vector<std::string>> listed(const std::string& list);
  /// Returns the values of keys, with one request if the store is a c10d::TCPStore. REQUIRES: all keys exist.
  virtual absl::StatusOr<std::vector<std::string>> get_all(const std::vector<std::string>& keys);

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
