#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "tessera/exit_code.h"

namespace tessera {

/// The purpose of a message between a worker and a parameter server. A worker asks questions. The server answers all of
/// them except kNote and kStage, in order, with kDone, kBusy or kRefused.
///
/// | kind          | first, second           | payload                                | payload of kDone   |
/// |---------------|-------------------------|----------------------------------------|--------------------|
/// | kSecret       |                         | the job's secret                       |                    |
/// | kJoin         | rank, life              | definition of the shards (ServedJob)   |                    |
/// | kReadVersions |                         |                                        | all versions       |
/// | kWrite        | first element, elements | their values, then each state          |                    |
/// | kReadStates   | first element, elements |                                        | each state         |
/// | kWriteTensor- | first element, elements | elements of the states of whole        |                    |
/// |   States      |                         | tensors (TensorStates::layout)         |                    |
/// | kReadTensor-  | first element, elements |                                        | these elements     |
/// |   States      |                         |                                        |                    |
/// | kWriteCounts  |                         | a count for each parameter             |                    |
/// | kReadCounts   |                         |                                        | the counts         |
/// | kPull, kCopy  |                         |                                        | the shard's values |
/// | kPush         | pulled version, step    | PushedNumbers, rates, options, used,   |                    |
/// |               |                         | gradients, pulled values (if lambda)   |                    |
/// | kStage        |                         | gradients, for a kApply that may come  | (no answer)        |
/// | kApply        | as kPush                | as kPush, without the gradients        |                    |
/// | kNote         | steps computed, pushed  |                                        | (no answer)        |
/// | kAwaitSlowest | steps                   |                                        |                    |
/// | kAwaitRound   | step                    |                                        |                    |
/// | kBegin        |                         |                                        |                    |
/// | kTake         | steps in all, taken     |                                        |                    |
/// | kEndResults   |                         |                                        |                    |
/// | kHold         |                         |                                        |                    |
/// | kRelease      |                         |                                        |                    |
///
/// kDone for a pull or copy has the shard's version in `first`, and kDone for a push has the version before the push
/// there. kRefused has an exit code in `first` and a text as its payload. kCopy is a pull that is not written into
/// recorded orders. The life of a worker is a number above 0 that no other worker of its rank has. The number is sent
/// with a minus sign if the worker was in the run before and has lost its connection.
///
/// The last five kinds of the table are for workers that come and go (JobMembers). kDone for kTake has the step, kOver
/// or kOwnFirst in `first`. With kOver, `second` is 1 for the worker that finishes. The question kTake has in `turn` a
/// number that stands for the data (JobMembers::deal). kDone for kAwaitSlowest has in `second` the worker's count of
/// steps. kDone for kJoin has the worker's number in `first`. The answer's `turn` is 1 if this worker gives the first
/// values. The answer's `shard` is 1 if the server comes back after its end (KeptShards), and `clock` has a number that
/// changes when the server comes back. kReadVersions asks for the versions that the shards had when the server came
/// back. After kBusy, the worker asks the same question again, a little later.
enum class MessageKind : std::uint32_t {
  kSecret = 1,
  kJoin,
  kWrite,
  kReadStates,
  kWriteTensorStates,
  kReadTensorStates,
  kWriteCounts,
  kReadCounts,
  kReadVersions,
  kPull,
  kCopy,
  kPush,
  kStage,
  kApply,
  kNote,
  kAwaitSlowest,
  kAwaitRound,
  kBegin,
  kTake,
  kEndResults,
  kHold,
  kRelease,
  kDone,
  kBusy,
  kRefused
};

/// The first bytes of each message, as they lie in memory: both ends are little-endian machines with the same version
/// of Tessera.
struct MessageHead {
  static constexpr std::uint32_t kMagic = 0x31767354;  ///< "Tsv1"
  static constexpr std::int64_t kNoTurn = -1;
  static constexpr std::int64_t kOver = -1, kOwnFirst = -2;  ///< answers to kTake

  std::uint32_t magic = kMagic;
  MessageKind kind = MessageKind::kDone;
  std::uint32_t shard = 0;  ///< number of the shard among those of the server
  std::uint32_t zero = 0;
  std::int64_t bytes = 0;  ///< bytes of the payload
  std::int64_t first = 0, second = 0;
  std::int64_t turn = kNoTurn;  ///< the turn of this pull or push in a recorded order that is replayed
  std::int64_t clock = 0;       ///< the largest number of an event that the sender knows
};

/// The numbers of a push that are the same for all elements; see UpdateRates.
struct PushedNumbers {
  float gradient_scale = 1, clip_value = 0;
  double lr = 0;
  std::int64_t is_first_of_run = 0;
};

/// One end of a connection of a worker with a server, over TCP. Errors have exit code 75. One thread at a time sends
/// and receives; any thread may call `shut`. `send` and `receive` wait; `send_some` and `receive_some` do not
/// (ServerCourier).
class ServerLink {
 public:
  using Clock = std::chrono::steady_clock;
  /// The longest time for which a send or a receive waits while no byte moves. No value means that there is no limit.
  using Limit = std::optional<std::chrono::milliseconds>;

  /// Takes a connected socket.
  explicit ServerLink(int socket);
  ~ServerLink();
  ServerLink(const ServerLink&) = delete;
  ServerLink& operator=(const ServerLink&) = delete;

  /// Connects to "HOST:PORT" or "[ADDRESS]:PORT", and tries again until `deadline`. Errors: 78 if the text is not such
  /// an address; 75 if the server is not reached by `deadline`.
  static absl::StatusOr<std::unique_ptr<ServerLink>> connect(const std::string& address, Clock::time_point deadline);

  /// Sends bytes. `more`: whether another call, right after this one, sends further bytes of the message.
  absl::Status send(std::span<const std::byte> bytes, Limit limit, bool more = false);
  /// Sends a head, in which it fills in `bytes`, and its payload.
  absl::Status send(MessageHead head, std::span<const std::byte> payload, Limit limit);
  /// Sends kRefused with the exit code and the text of an error.
  absl::Status refuse(const absl::Status& why, Limit limit);
  absl::Status refuse(ExitCode code, const std::string& text, Limit limit);
  absl::Status receive(std::span<std::byte> bytes, Limit limit);
  /// These functions send or receive as many bytes as is possible without waiting, and return their number. The number
  /// is 0 if `socket` has to be polled first.
  absl::StatusOr<std::size_t> send_some(std::span<const std::byte> bytes, bool more);
  absl::StatusOr<std::size_t> receive_some(std::span<std::byte> bytes);
  /// Waits until bytes may have come, or `limit` is over.
  absl::Status wait_to_receive(Limit limit) const;
  int socket() const { return socket_; }
  /// Receives a head. Error 75 if the bytes are not a head.
  absl::StatusOr<MessageHead> receive_head(Limit limit);

  /// Returns whether the other end has closed the connection, or `shut` was called at this end.
  bool is_closed() const;
  /// Ends the connection: calls under way and later calls fail.
  void shut();

 private:
  absl::Status wait_for(short event, Limit limit) const;

  const int socket_;
};

/// A listening socket for parameter servers.
struct ServerSocket {
  int socket = -1;
  std::string address;  ///< "127.0.0.1:41234", with the port that the system chose
};
/// Listens at "HOST:PORT"; for port 0 the system chooses a free port. Errors: 78 if the text is not such an address, or
/// if this host does not know the host name; 69 if the port is in use; 71 if the system gives no socket.
absl::StatusOr<ServerSocket> listen_for_workers(const std::string& address);

/// Returns the bytes of a value, or of a range of values.
template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

}  // namespace tessera
