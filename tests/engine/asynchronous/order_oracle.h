#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sharding/unit.h"
#include "tessera/own_rules.h"
#include "tests/engine/asynchronous/order_lines.h"
#include "tests/support/session.h"

namespace tessera::testing {

/// One kind of run whose bits OrderOracle can compute.
struct OrderOption {
  const char* name = "";
  Adjust adjust = nullptr;
  TinyOptions model = {};
  bool is_weighted = false;  ///< microbatches have the weights of weight_of
  int skipping_rank = -1;    ///< the rank whose step 2 has an infinite loss, so that it skips the step; -1: none
  OwnRules own_rules = {};   ///< rules of the program's
};

/// Returns the options of all tests of orders: each rule for single elements, and each key that changes an update.
/// whole_order_options has those of rules that need more.
const std::vector<OrderOption>& order_options();

/// Returns the weight of a rank's microbatch. `microbatch` is the microbatch's number, counted over all steps.
inline double weight_of(int rank, std::size_t microbatch) {
  return static_cast<double>(1 + (3 * microbatch + static_cast<std::size_t>(rank)) % 5);
}

/// Makes step `i` (from 0) of a rank, as OrderOracle does.
inline StepResult make_step(Session& session, const OrderOption& option, std::size_t i) {
  const int rank = session.mesh.rank();
  for (std::size_t k = 0; k < session.microbatches; ++k) {
    const std::size_t microbatch = i * session.microbatches + k;
    at::Tensor loss = session.loss(microbatch);
    if (rank == option.skipping_rank && i == 1) loss = loss * std::numeric_limits<double>::infinity();
    session.engine.backward(loss, {.weight = option.is_weighted ? weight_of(rank, microbatch) : 1.0});
  }
  return session.engine.step();
}

/// Asynchronous training of Tiny in plain LibTorch, on one thread: a model for each rank and one for the owners, and
/// updates by LibTorch's own operators. It makes the pulls and pushes of a recorded order.
class OrderOracle {
 public:
  /// `servers` is the number of parameter servers that own the shards; if it is 0, the ranks own them.
  OrderOracle(const Strategy& strategy, int ranks, const OrderOption& option = {}, int servers = 0);
  void play(const std::vector<OrderLine>& lines);

  /// Returns the owners' values, as values_of returns them.
  Values values() const { return values_of(*owners_); }
  /// Returns each rank's loss of each step [rank][step]. A step without a push has an infinite loss.
  const std::vector<std::vector<double>>& losses() const { return losses_; }
  /// Returns how many norms and gradients were clipped.
  int clipped() const { return clipped_; }

 private:
  struct Piece {
    std::size_t parameter;  ///< index into named_parameters
    std::int64_t begin, numel;
  };
  struct Shard {
    std::vector<Piece> pieces;
    bool is_whole = false;  ///< whether it is a whole group, whose rule needs whole tensors
    std::int64_t version = 0;
    std::map<int, std::int64_t> pulled;                ///< one for each rank
    std::map<std::size_t, std::int64_t> updates = {};  ///< one for each parameter
  };
  using Key = std::pair<std::string, std::pair<std::size_t, int>>;
  /// The numbers of a rank's step.
  struct Rates {
    float scale = 1;  ///< the factor of gradients, apart from the one for their age
    double lr = 0;
    std::int64_t applied = 0;  ///< number of the rank's steps that were not skipped, up to this one
  };

  void compute(int rank, std::int64_t step);
  void pull(const OrderLine& line, Shard& shard);
  void push(const OrderLine& line, Shard& shard);
  /// Returns the rate and the weight decay of a parameter. `everybodys` is the learning rate of parameters in no group.
  std::pair<double, double> numbers_of(std::size_t parameter, double everybodys) const;
  at::Tensor compensated(const Piece& piece, const at::Tensor& g, const at::Tensor& pulled);
  void update(const Piece& piece, at::Tensor g, std::int64_t count, double everybodys);

  const Strategy strategy_;
  const OrderOption option_;
  const int ranks_;
  Tiny owners_;
  std::vector<Tiny> models_;  ///< one for each rank
  /// [rank]: parameters of the rank; the last entry holds those of the owners
  std::vector<std::vector<at::Tensor>> of_;
  std::vector<at::Tensor> first_, second_, third_;  ///< [parameter]: states
  std::vector<at::Tensor> mean_squares_;            ///< [parameter]: means of squared gradients
  std::vector<std::vector<at::Tensor>> whole_;      ///< [parameter]: states of rules of whole tensors
  std::vector<Rates> rates_;                        ///< [rank]: the numbers of its newest step
  std::vector<Batch> batches_;
  std::map<Key, Shard> shards_;
  std::vector<std::vector<double>> losses_;
  int clipped_ = 0;
};

}  // namespace tessera::testing
