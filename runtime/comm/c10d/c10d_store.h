#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "runtime/comm/key_value_store.h"

namespace tessera {

/// A KeyValueStore over any c10d::Store. A c10d::Store serves one request of a client at a time. `get` therefore asks
/// again and again (every 0.2 to 10 ms): a waiting request would block other threads. c10d's exceptions become statuses
/// of exit code 75. Their texts name the process that served the store, and state that this process is gone.
class C10dStore : public KeyValueStore {
 public:
  /// `server` is the name of the process that serves the store. Messages contain it.
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store, std::string server = "rank 0")
      : store_(std::move(store)), server_(std::move(server)) {}

  absl::Status set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override;
  absl::StatusOr<bool> has(const std::string& key) override;
  absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) override;
  absl::Status append(const std::string& list, const std::string& text) override;
  absl::StatusOr<std::vector<std::string>> listed(const std::string& list) override;
  absl::StatusOr<std::vector<std::string>> get_all(const std::vector<std::string>& keys) override;
  std::shared_ptr<KeyValueStore> connected_anew() override;

  /// Sets the address at which the other ranks reach this host. Call it before the store is shared.
  void set_own_address(std::string address) { own_address_ = std::move(address); }
  std::string own_address() const override { return own_address_; }

  /// Returns the store itself, at which c10d's own backends find each other.
  const c10::intrusive_ptr<c10d::Store>& c10d_store() const { return store_; }
  const std::string& server() const { return server_; }

 private:
  template <typename Result, typename Body>
  Result guarded(const char* what, const std::string& key, Body body) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string server_;
  std::string own_address_;
};

/// Returns the text of an exception, without c10's stack trace, so that it can be shown to a user.
std::string text_of_c10_exception(const std::exception& error);

}  // namespace tessera
