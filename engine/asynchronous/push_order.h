#pragma once

// See docs/glossary.md: flat group, unit.

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The name of a shard in files and messages: the owner's part of a flat group.
struct ShardName {
  std::string unit;
  std::size_t group = 0;  ///< number among the unit's groups
  int owner = 0;          ///< the rank or server that owns the shard
};

/// An action of a rank on a shard.
struct ShardEvent {
  /// number of the event among those of all ranks and shards; events of one shard, or of one rank, happened in the
  /// order of these numbers
  std::int64_t number = 0;
  std::int64_t step = 0;     ///< step of the rank, from 1
  std::size_t shard = 0;     ///< index among the ShardNames
  std::int64_t version = 0;  ///< version of the shard; for a push: the version before the push
  int rank = 0;
  bool is_push = false;
};

/// Says how many ranks and owners take part in a run, and whether the owners are ranks or servers. Only a run with the
/// same parties can replay a recorded order.
struct OrderParties {
  int ranks = 0;
  std::string owners;  ///< who owns the shards, as in "sync.owners": "ranks" or "servers"
  int owner_count = 0;
};

/// Returns the first line of an order. `steps`: the number of steps of each rank, if it is known when the file begins.
/// The line then has them as "steps" (OrderHead).
std::string first_line_of(const OrderParties& parties, const std::vector<std::int64_t>& steps = {});
/// Returns the line of an event of `shard`.
std::string line_of(const ShardEvent& event, const ShardName& shard);

/// Writes the order of pushes and pulls ("sync": "record_order"): a first line with the OrderParties (first_line_of),
/// then a line of JSON for each event (line_of),
///
///     {"event":12,"rank":0,"step":3,"op":"push","unit":"layers.0","group":0,"shard":1,"version":5}
///
/// Each rank appends its own lines, many at a time, so the file mixes the lines of several ranks; "event" gives the
/// order of all events. A rank that is killed loses its latest lines. PushOrder owns an OrderWriter.
class OrderWriter {
 public:
  /// Creates the file, or replaces it, if `is_first`. One rank does this before the other ranks open the file. The
  /// errors are those of any output file.
  static absl::StatusOr<OrderWriter> open(const std::string& path, const OrderParties& parties, bool is_first);
  OrderWriter(OrderWriter&& other) noexcept;
  OrderWriter& operator=(OrderWriter&&) = delete;
  ~OrderWriter();  ///< writes the lines that are left; an error is logged

  void add(const ShardEvent& event, const ShardName& shard);
  /// Writes the collected lines once they have 64 KiB. Errors: 74 if the write fails; 71 without free memory; 73 if the
  /// file cannot be written to at all.
  absl::Status write_if_many() { return text_.size() < kMany ? absl::OkStatus() : write(); }

 private:
  static constexpr std::size_t kMany = std::size_t{1} << 16;
  OrderWriter(std::string path, int file) : path_(std::move(path)), file_(file) {}
  absl::Status write();

  std::string path_;
  int file_ = -1;
  std::string text_;
};

/// The rank whose turn it is at a shard, in a recorded order that is replayed.
struct ShardTurn {
  int rank = 0;
  bool is_push = false;
};

/// Returns the error (64) for a rank whose program pushes again after the rank's last turn. `operation`: a text that
/// names the shard. A pull after the last turn is no error: it waits until all turns of the shard have been taken, and
/// reads the shard's last values.
absl::Status end_of_turns(const std::string& operation, int rank);
/// Returns an error (64) unless `turn` is the turn of a push, or of a pull if `is_push` is false.
absl::Status expect_turn(const ShardTurn& turn, bool is_push, const std::string& operation);

/// Reads a file of OrderWriter. Returns the turns of each of `shards`, in order. Errors: 66 if the file is missing; 77
/// if permission is missing; 65, with the line, if OrderWriter did not write the file, or if it has other shards, other
/// owners or another number of ranks. A file of an earlier version names no owners.
absl::StatusOr<std::vector<std::vector<ShardTurn>>> read_order(const std::string& path, const OrderParties& parties,
                                                               std::span<const ShardName> shards);

/// The content of an order's first line that a program needs before it makes an Engine.
struct OrderHead {
  int ranks = 0;
  std::vector<std::int64_t> steps = {};  ///< [rank]; empty if the line has no numbers of steps, as in a recorded order
};
/// Reads the first line of an order. Errors: those of read_order for the file and this line.
absl::StatusOr<OrderHead> read_order_head(const std::string& path);

/// The order of the pulls and pushes of one rank, as "sync" says: it is recorded ("record_order"), replayed
/// ("play_order"), or free. PulledParameters owns a PushOrder.
class PushOrder {
 public:
  /// Adds a shard; shards are numbered in the order of these calls. REQUIRES: `open` was not called.
  void add_shard(ShardName shard) { names_.push_back(std::move(shard)); }
  std::size_t shards() const { return names_.size(); }
  const ShardName& name(std::size_t shard) const { return names_[shard]; }

  /// Reads and opens the files that `config` names. Rank 0 creates the recorded file before `meet`, in which all ranks
  /// wait for each other, and the other ranks open it afterwards. Errors: those of read_order and OrderWriter::open.
  absl::Status open(const AsynchronousConfig& config, const OrderParties& parties, int rank,
                    absl::FunctionRef<void()> meet);

  bool is_recorded() const { return writer_.has_value(); }
  bool is_played() const { return !turns_.empty(); }
  /// Returns the turns of a shard in the order that is replayed. REQUIRES: is_played().
  const std::vector<ShardTurn>& turns(std::size_t shard) const { return turns_[shard]; }

  /// Records an event. REQUIRES: is_recorded().
  void add(const ShardEvent& event) { writer_->add(event, names_[event.shard]); }
  /// Ends a step (OrderWriter::write_if_many).
  absl::Status end_step() { return writer_ ? writer_->write_if_many() : absl::OkStatus(); }

 private:
  std::vector<ShardName> names_;               ///< [shard]
  std::vector<std::vector<ShardTurn>> turns_;  ///< [shard]; empty where no recorded order is replayed
  std::optional<OrderWriter> writer_;
};

}  // namespace tessera
