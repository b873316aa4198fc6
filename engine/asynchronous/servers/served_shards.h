#pragma once

// See docs/glossary.md: flat group, unit.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/asynchronous/pulled_parameters.h"
#include "engine/asynchronous/servers/elastic_worker.h"
#include "engine/asynchronous/servers/served_cut.h"
#include "engine/asynchronous/servers/server_courier.h"
#include "engine/asynchronous/servers/server_link.h"
#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The units in the order in which steps use them. ServedShards asks for the values of the next unit before its first
/// read. The next unit is the unit that followed in the previous step.
class UnitsInTurn {
 public:
  void add(std::size_t unit) { now_.push_back(unit); }
  void end_step() {
    before_.swap(now_);
    now_.clear();
  }
  /// Returns the unit that followed `unit` in the previous step; nothing if no unit did.
  std::optional<std::size_t> after(std::size_t unit) const {
    const auto here = std::ranges::find(before_, unit);
    return here == before_.end() || here + 1 == before_.end() ? std::nullopt : std::optional(here[1]);
  }

 private:
  std::vector<std::size_t> now_, before_;  ///< units of this step, and of the previous step
};

/// This rank's side of the parameters that asynchronous ranks train together, if parameter servers own the shards
/// (ShardOwners::kServers). Each server owns a part of each flat group, or whole groups (ServedCut). The rank pulls
/// from all servers, and pushes to each server the gradients of the parts that the server owns. A server applies a push
/// as soon as the push has arrived (ServedJob). While ranks train, they communicate only with servers, over one
/// connection per server. So ranks may be on any hosts, and the other ranks continue when one rank ends.
///
/// A thread for each server sends and receives (ServerCourier). So the gradients of a unit are sent as soon as the last
/// backward of a step has made them. The servers keep them until the rank has computed its norm. While a unit computes
/// in forward, the values of the next unit arrive. The next unit is the unit that followed in the previous step.
///
/// | memory                                 | whose         | changed by                                             |
/// |----------------------------------------|---------------|--------------------------------------------------------|
/// | shards: values, states, version, counts| the servers'  | pushes                                                 |
/// | HostCopies, pulled values              | this rank's   | `pull`, at most once a step                            |
/// | states and counts of the rank's part   | this rank's   | `bring_together`, which fetches them for a checkpoint  |
///
/// If several ranks are one replica (AsynchronousConfig::replica_ranks), each of them has a piece of each group. A
/// shard then consists of the elements that are both in a piece and in a server's part. A rank pulls and pushes the
/// shards of its piece. The ranks of a replica pull units in the same order, and gather the values that they have
/// pulled. Their gradients are summed before the push. So a step of the replica has one version of each shard, and one
/// push to it.
///
/// Where workers come and go ("sync.elastic"), each worker is a job with one rank. At its first pull, the first worker
/// gives its values to the servers. Values that a later worker's program sets before its first pull, such as weights
/// from a file, are replaced by the servers' values. No program writes parameters after the first pull.
///
/// The environment names the servers (TESSERA_SERVERS, TESSERA_SERVERS_SECRET). The thread that trains calls all
/// functions. If a server that keeps its shards ends, the rank waits at most comm.timeout_s for the server to come
/// back. The functions throw tessera::Error: 75 if a server is gone or does not answer in time; 64 if a program leaves
/// the recorded order that it replays. If a server refuses a question, the error has the server's exit code.
class ServedShards final : public PulledParameters {
 public:
  /// Connects to all servers, points each group's states at memory of this rank, and gives the servers the units'
  /// values. `replica`: the ranks that make each step together; null if each rank is a replica. Keeps references to
  /// `units`, `plan`, `board` and `copies`. It is collective. Throws tessera::Error (78) if the environment names no
  /// servers, or if an order is to be recorded or replayed and ranks are on several hosts.
  ServedShards(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board,
               HostCopies& copies, const Strategy& strategy, std::shared_ptr<Collectives> replica);

  /// Returns the bytes of this rank's states, from which checkpoints are written.
  std::int64_t memory_bytes() const override { return memory_.bytes(); }
  GradientAges push(const ShardRule& rule, const PushRates& with) override;
  void skip() override;
  void begin_last_backward() override;
  void reduced(const Unit& unit) override;
  int ranks_of_replica() const override { return pieces_; }
  void sum_over_replica(LocalStep& told, std::span<char> used) override;
  void adopt() override;
  /// Every rank pulls the newest values, and fetches the states and counts of its part.
  void bring_together() override;
  void share_counts() override;
  void take_newest() override;
  std::span<std::int64_t> counts(const FlatGroup& group) override;
  std::optional<std::int64_t> steps_of_all() const override;

  /// Returns the number of the step that this worker makes next, of the `steps` steps that all workers make together
  /// (Engine::take_step). Returns nothing if all steps are made, or if this worker itself holds the last steps.
  /// `data_order`: a number that identifies the data of all steps (Engine::take_step). REQUIRES: sync.elastic.
  std::optional<std::int64_t> take_step(std::int64_t steps, std::int64_t data_order);
  /// These return whether all steps are made, and whether this worker writes the results.
  bool is_over() const { return worker_.is_over(); }
  bool finishes() const { return worker_.finishes(); }
  /// Says that this worker has written the results, so that no other worker is told to write them. REQUIRES:
  /// sync.elastic. Throws tessera::Error (64) if this worker was not told to write them.
  void end_results();

 private:
  struct Server {
    std::string address;
    std::string name;  ///< "server 1 (10.0.0.5:4711)"
    std::unique_ptr<ServerCourier> courier;
    std::deque<ServerCourier::Ticket> asked;  ///< questions whose answers `hear` has not returned yet
  };
  struct Group {
    FlatGroup* flat = nullptr;
    std::vector<Extent> shards;        ///< [server][piece]
    std::vector<std::int64_t> pulled;  ///< [server]: the pulled version of the shard of this rank's piece
    std::size_t first_parameter = 0;   ///< number of the group's first parameter among all trainable ones
    std::vector<std::int64_t> counts;  ///< [parameter]: number of updates at the last call of bring_together
  };

  int servers() const { return static_cast<int>(servers_.size()); }
  std::span<const std::byte> gradients_of(const FlatGroup& flat, Extent part) const;
  /// Returns the copies of a group's values.
  float* values_of(const FlatGroup& flat) const { return reinterpret_cast<float*>(copies_.values(flat)); }
  void pull_unit(const Unit& unit) override;
  void connect(const Strategy& strategy);
  void join(int server, ServerLink::Clock::time_point deadline);
  /// Returns the number of times that servers have come back.
  std::int64_t returns() const;
  /// Lets other workers begin with the values that this worker has given to the servers.
  void begin();
  void write_values();
  void fetch_states();
  /// Sends each server a question of this `kind`, and waits for its answer.
  void tell_all(MessageKind kind, const char* operation);
  std::string self() const;
  std::string definition_for(int server, const std::string& run, const Strategy& strategy) const;
  void place(FlatGroup& group, const MemoryPlan& plan);
  /// Throws if an order is recorded or replayed, and the ranks have no common file.
  void expect_common_file() const;

  Extent shard_at(const Group& group, int server, int piece) const;
  /// Returns the number of a shard among the shards of its server.
  std::uint32_t number_of(std::size_t group, int piece) const;
  enum class Pieces { kOwn, kAll };  ///< the shards of this rank's piece, or of the pieces of all ranks of the replica
  /// Calls `visit(server, piece, shard)` for each of these shards of a group, except for empty shards.
  template <class Visit>
  void for_each_shard(const Group& group, Pieces pieces, const Visit& visit) const;
  /// Gathers a group's values from the ranks of the replica, each of which has pulled a piece. If the group is one
  /// shard, one of the ranks has pulled it, and sends it to the others.
  void gather(std::size_t index);
  template <class Visit>
  void for_each_tensor_run(std::size_t index, const Visit& visit) const;
  std::size_t shard_of(std::size_t group, int server) const;
  /// Returns the turn of this rank's next pull or push of a shard in the recorded order that is replayed. A pull after
  /// the rank's last turn gets the number of all turns.
  std::int64_t next_turn(std::size_t group, int server, bool is_push);
  void note(std::size_t group, int server, bool is_push, const MessageHead& reply);
  /// Copies the groups [first, last) from all servers. `kind`: kPull or kCopy.
  void copy(std::size_t first, std::size_t last, MessageKind kind);
  void ask_for_copies(std::size_t index, MessageKind kind);
  void take_copies(std::size_t index, MessageKind kind);
  void ask_for_unit(std::size_t unit);
  void take_unit(std::size_t unit);
  void settle();
  void wait_for_slowest();
  void send_push(std::size_t group, const PushRates& with);
  void end_push(std::size_t group, GradientAges& ages);
  void tell_steps(std::int64_t computed, std::int64_t pushed);
  void wait_for_turn_of_round();
  void end_step();
  void forget_staged();

  /// Asks a server a question; `hear` returns the answer.
  void ask(int server, ServerQuestion question);
  /// Sends a message that has no answer.
  void tell(int server, ServerQuestion message);
  /// Waits for an answer of this server: the answer to the oldest question in `asked`. Throws the server's refusal, or
  /// the error of a lost connection.
  MessageHead hear(int server, const char* operation);
  /// Asks a question, and waits for its answer.
  MessageHead answer_to(ServerQuestion question, int server, const char* operation);

  const std::shared_ptr<Collectives> replica_;  ///< null where each rank is a replica
  const int piece_, pieces_;                    ///< this rank's number in the replica, and the replica's number of
                                                ///< ranks
  const std::chrono::milliseconds limit_;       ///< time for an answer of a server
  const bool pulls_ahead_;                      ///< whether a unit may be pulled before its first read
  Arena memory_;
  ServedCut cut_;
  std::vector<Group> groups_;
  std::vector<char> is_staged_;          ///< [group]: the servers have this step's gradients
  std::optional<std::size_t> ahead_;     ///< the unit that is pulled ahead of its first read and whose values have not
                                         ///< come yet
  UnitsInTurn units_in_turn_;            ///< the units that were pulled
  std::int64_t waited_for_ = 0;          ///< the last step in which this rank waited for slow ranks
  std::vector<std::size_t> next_turns_;  ///< [shard]: index among the shard's turns at which the search for this rank's
                                         ///< next turn begins; empty where no recorded order is replayed
  std::int64_t clock_ = 0;               ///< the largest number of an event that this rank knows
  std::int64_t newest_ = 0;              ///< the largest number of pushes of any shard, as far as this rank's pulls and
                                         ///< pushes have shown
  ElasticWorker worker_;                 ///< keeps its first state if the run is not elastic
  std::vector<Server> servers_;  // the servers' threads use the members above, so this member is destroyed first
};

}  // namespace tessera
