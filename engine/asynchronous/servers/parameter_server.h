#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <atomic>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "engine/asynchronous/servers/served_job.h"
#include "engine/asynchronous/servers/server_link.h"
#include "runtime/base/mutex.h"

namespace tessera {

/// A parameter server ("sync": {"owners": "servers"}): a process, or threads of a process. It owns shards and computes
/// nothing but their updates. `tessera serve` makes a ParameterServer. It serves one run after another: a run begins
/// when its first worker comes, and its shards are dropped when the last worker has gone. A run whose workers come and
/// go ("sync.elastic") lasts as long as the server.
///
/// Each worker has a connection and a thread of its own here, so the end of a worker is noticed immediately, and
/// affects no other worker. A push to a shard is applied only after all of its bytes have arrived. If a worker is
/// killed before that, the shard does not change.
class ParameterServer {
 public:
  /// The smallest and the largest number of bytes of a secret.
  static constexpr std::size_t kLeastSecret = 16, kMostSecret = 256;

  /// Listens at `address` (listen_for_workers), and from now on serves workers that send `secret`. `keep`: where shards
  /// are kept. A server that is started again with the same options then continues the run. If `keep` has no value, the
  /// shards are lost when the server ends. `offload`: folder for scratch files in which shards lie; empty: they are in
  /// memory. Errors: those of listen_for_workers; 78 for a secret that is too short or too long, or a bad `keep`; those
  /// of make_folders and look_at_scratch_directory for the two folders.
  static absl::StatusOr<std::unique_ptr<ParameterServer>> start(const std::string& address, const std::string& secret,
                                                                const std::optional<KeepOptions>& keep = {},
                                                                const std::string& offload = "");
  /// Ends all connections and threads. If shards are kept, it writes the changes that are not on the disk yet.
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// Returns the address to which workers connect.
  const std::string& address() const { return listener_.address; }
  /// Returns whether no worker is connected.
  bool is_idle() const;
  /// Returns whether no worker is connected, and none is awaited. If shards are kept, workers of an earlier server are
  /// awaited for ServedJob::kForReturns from the start on.
  bool may_end() const;

 private:
  struct Connection {
    explicit Connection(int socket) : link(socket) {}
    ServerLink link;
    const ServerLink::Clock::time_point since = ServerLink::Clock::now();
    std::atomic<bool> is_known = false;  ///< whether the worker has sent the secret
    std::atomic<bool> has_ended = false;
    std::jthread thread;  // the last member, so that it is destroyed (joined) first
  };

  ParameterServer(ServerSocket listener, std::string secret, std::optional<KeepOptions> keep, std::string offload);
  void accept_all();
  /// Removes connections that have ended, and ends those that have not sent the secret in time, no matter how much else
  /// they send.
  void look_at_connections();
  bool has_place_for_stranger() const;
  void serve(Connection& connection);
  absl::Status hear_secret(Connection& connection);
  /// The run that a worker has joined, and the Place that JobMembers::join returned.
  struct Joined {
    std::shared_ptr<ServedJob> job;  ///< null: the worker has to ask again
    JobMembers::Place place;
  };
  absl::StatusOr<Joined> join(const MessageHead& head, Connection& connection);
  void drop_if_empty(const std::shared_ptr<ServedJob>& job);

  const ServerSocket listener_;
  const std::string secret_;
  const std::optional<KeepOptions> keep_;
  const std::string offload_;
  const ServerLink::Clock::time_point since_ = ServerLink::Clock::now();
  std::atomic<bool> is_ending_ = false;
  mutable Mutex mutex_;
  std::shared_ptr<ServedJob> job_ ABSL_GUARDED_BY(mutex_);
  std::list<Connection> connections_;  ///< only the accepting thread uses this; after that thread has ended, the
                                       ///< destructor does
  std::jthread accepting_;
};

}  // namespace tessera
