#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/comm/key_value_store.h"

namespace tessera {

/// Time that the store's server may take to answer a request.
constexpr std::chrono::milliseconds kForTheStore{2000};

/// Returns whether a wait is in vain, and may therefore end before its limit.
using InVain = std::function<bool()>;

/// Runs each of `tasks` on a thread of its own and waits no longer than `limit`. Returns true if all tasks returned
/// true in time. A task that is not over by then keeps running, so it must own everything that it uses. Tasks must not
/// throw. The wait also ends when `in_vain`, which may be null, returns true. `in_vain` is first called after
/// kForTheStore.
bool succeed_in_time(std::vector<std::function<bool()>> tasks, std::chrono::milliseconds limit,
                     const InVain& in_vain = nullptr);

/// Does for one task, which cannot fail, the same as succeed_in_time for several tasks.
bool ends_in_time(std::function<void()> task, std::chrono::milliseconds limit, const InVain& in_vain = nullptr);

/// Runs `questions` with `store`, on a thread of its own, since the process that serves the store may hang. Returns
/// true if the store has answered or failed within `limit`. Otherwise returns false while `questions` keeps running, so
/// `questions` must own everything that it uses. While `questions` of an earlier call still runs, no thread of this
/// process waits for the same store: the next call returns false at once. `in_vain` has the same meaning as for
/// succeed_in_time.
bool ask_in_time(const std::shared_ptr<KeyValueStore>& store, std::function<void(KeyValueStore&)> questions,
                 std::chrono::milliseconds limit = kForTheStore, const InVain& in_vain = nullptr);

/// A connection to the store that one thread has for itself. The thread sends its questions over this connection as
/// ask_in_time does. The connection is made when the first question is asked.
class OwnConnection {
 public:
  /// `shared` is the connection of the rank's groups. It may be in use by the call in which the program waits.
  explicit OwnConnection(std::shared_ptr<KeyValueStore> shared) : shared_(std::move(shared)) {}

  /// Returns whether it is connected now, or false if the store does not answer in time.
  bool connect();
  /// Does the same as ask_in_time. Returns false, too, if it cannot connect.
  bool ask(std::function<void(KeyValueStore&)> questions) {
    return connect() && ask_in_time(own_, std::move(questions));
  }
  /// Uses the shared connection from now on, since its own connection has ended. Returns false if it already used the
  /// shared connection.
  bool fall_back() { return std::exchange(own_, shared_) != shared_; }

 private:
  const std::shared_ptr<KeyValueStore> shared_;
  std::shared_ptr<KeyValueStore> own_;  ///< null until it is needed
};

}  // namespace tessera
