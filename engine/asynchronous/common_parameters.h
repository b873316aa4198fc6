#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <optional>
#include <span>

#include "engine/asynchronous/peer_board.h"
#include "engine/asynchronous/shard_rule.h"
#include "sharding/unit.h"
#include "tessera/age_histogram.h"

namespace tessera {

class PulledParameters;
struct LocalStep;

/// The ages of a step's gradients. Each shard is updated separately and has its own age. With Hogwild all parameters
/// have one age. An age is the number of updates by other ranks since this rank read the values.
struct GradientAges {
  double mean() const { return count > 0 ? static_cast<double>(sum) / static_cast<double>(count) : 0.0; }
  void add(std::int64_t age) {
    sum += age;
    most = age > most ? age : most;
    ++count;
    histogram.add(age);
  }
  std::int64_t sum = 0, most = 0, count = 0;
  AgeHistogram histogram;
};

/// The numbers with which a push applies its gradients.
struct PushRates {
  UpdateRates rates;           ///< rates of the push; gradient_scale does not take age into account yet
  std::span<const char> used;  ///< [trainable parameter, by unit, group, layout]: whether this rank has a gradient of
                               ///< the parameter
  // A server needs these numbers of the rule, since it has no copy of the rule's numbers. A rank that applies gradients
  // itself reads them from the rule.
  std::span<const double> learning_rates = {};  ///< LearningRates::all
  std::span<const double> options = {};         ///< UpdateOptions::all
};

/// The parameters that ranks train together. Each rank makes its own forward and backward. The parameters lie in memory
/// that all ranks map, or in memory of servers. ReplicaSync owns this object, and a LoneStep uses it. All calls come
/// from the thread that trains.
///
/// | class          | "sync"'s type | a rank computes with         | an update is                                   |
/// |----------------|---------------|------------------------------|------------------------------------------------|
/// | OwnedShards    | asynchronous  | a copy of its own, pulled    | one rank's, applied under a lock, shard by shard |
/// | ServedShards   | the same      | a copy of its own, pulled    | one rank's, which a server applies likewise    |
/// | HogwildValues  | hogwild       | the values that all write to | one rank's, merged into them, without a lock   |
/// | FirstGradients | backups       | a copy of its own, pulled    | one with the sum of the first ranks' gradients |
class CommonParameters {
 public:
  /// Keeps a reference to `board`.
  explicit CommonParameters(PeerBoard& board) : board_(board) {}
  virtual ~CommonParameters() = default;
  CommonParameters(const CommonParameters&) = delete;
  CommonParameters& operator=(const CommonParameters&) = delete;

  PeerBoard& board() { return board_; }

  /// Returns the bytes that this rank has in addition to TrainingMemory (MemoryCategory::kOptimizer).
  virtual std::int64_t memory_bytes() const = 0;
  /// Returns the bytes of this rank's scratch (MemoryCategory::kStaging).
  virtual std::int64_t scratch_bytes() const { return 0; }
  /// Shares this rank's parameters and states with all ranks after they were written. The written values are the same
  /// on all ranks, or are at least correct in the part that each rank owns. It is collective.
  virtual void adopt() = 0;
  /// Merges the states of all ranks into one set of states, and returns once every rank sees the result. It is
  /// collective.
  virtual void bring_together() = 0;
  /// Returns how often each parameter of a group was updated. This rank writes these numbers into a checkpoint.
  /// REQUIRES: no rank pushes.
  virtual std::span<std::int64_t> counts(const FlatGroup& group) = 0;
  /// Applies the numbers that loading a checkpoint has written into the result of `counts`. It is collective.
  virtual void share_counts() { board_.meet("counts of steps"); }
  /// Returns the seconds so far in which this rank waited for other ranks or copied from them.
  virtual double communication_seconds() const = 0;
  /// Returns `this` if a rank computes with a copy of the values that it pulls. Returns null if it computes with the
  /// values that all ranks write.
  virtual PulledParameters* pulled() { return nullptr; }

 protected:
  std::int64_t step() const { return board_.pushed(board_.rank()) + 1; }  ///< number of the step under way

  PeerBoard& board_;
};

/// Common parameters to which each rank applies its gradients by itself, in an AsynchronousStep.
class PushedParameters : public CommonParameters {
 public:
  using CommonParameters::CommonParameters;

  /// Applies this rank's gradients of all units with the update rule `rule`, and ends this rank's step. Throws
  /// tessera::Error (75) where another rank has ended.
  virtual GradientAges push(const ShardRule& rule, const PushRates& with) = 0;
  /// Returns how many ranks make a step together, with the sum of their gradients (AsynchronousConfig::replica_ranks).
  virtual int ranks_of_replica() const { return 1; }
  /// Sums the gradients of all units over the ranks of a replica, in place. Afterwards `told` and `used` ([trainable
  /// parameter]) are about all of these ranks. It is collective over these ranks.
  virtual void sum_over_replica(LocalStep& /*told*/, std::span<char> /*used*/) {}
  /// Ends this rank's step without a push.
  virtual void skip() = 0;
  /// Says that the last backward of this rank's step begins.
  virtual void begin_last_backward() {}
  /// Says that this backward has made a unit's gradients, so that they may be sent ahead of `push`. It is called again
  /// if the gradients have changed. The gradients stay in place until the step ends, or until the next backward.
  virtual void reduced(const Unit&) {}
  /// Returns the number of steps that all workers together have pushed, as far as this rank has seen. Returns nothing
  /// if each rank counts only its own steps.
  virtual std::optional<std::int64_t> steps_of_all() const { return std::nullopt; }
};

}  // namespace tessera
