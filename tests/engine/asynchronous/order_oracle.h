#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sharding/unit.h"
#include "tests/engine/asynchronous/order_lines.h"
#include "tests/support/session.h"

namespace tessera::testing {

/// Asynchronous training of Tiny in plain LibTorch, on one thread: a model for each rank and one for the owners, and
/// updates by LibTorch's own operators. It makes the pulls and pushes of a recorded order.
class OrderOracle {
 public:
  /// `servers`: the number of parameter servers that own the shards; 0: the ranks own them.
  OrderOracle(const Strategy& strategy, int ranks, TinyOptions options = {}, int servers = 0);
  void play(const std::vector<OrderLine>& lines);

  /// Returns the owners' values, as values_of returns them.
  Values values() const { return values_of(*owners_); }
  /// Returns each rank's loss of each step [rank][step].
  const std::vector<std::vector<double>>& losses() const { return losses_; }

 private:
  struct Piece {
    std::size_t parameter;  ///< index into named_parameters
    std::int64_t begin, numel;
  };
  struct Shard {
    std::vector<Piece> pieces;
    std::int64_t version = 0;
    std::map<int, std::int64_t> pulled;                ///< one for each rank
    std::map<std::size_t, std::int64_t> updates = {};  ///< one for each parameter
  };
  using Key = std::pair<std::string, std::pair<std::size_t, int>>;

  void compute(int rank, std::int64_t step);
  void pull(const OrderLine& line, Shard& shard);
  void push(const OrderLine& line, Shard& shard);
  void update(std::size_t parameter, const Piece& piece, const at::Tensor& gradient, std::int64_t count);

  const Strategy strategy_;
  const int ranks_;
  Tiny owners_;
  std::vector<Tiny> models_;  ///< one for each rank
  /// [rank]: parameters of the rank; the last entry holds those of the owners
  std::vector<std::vector<at::Tensor>> of_;
  std::vector<at::Tensor> first_, second_;  ///< [parameter]: states
  std::vector<Batch> batches_;
  std::map<Key, Shard> shards_;
  std::vector<std::vector<double>> losses_;
};

}  // namespace tessera::testing
