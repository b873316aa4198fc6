// Compares the results of PowerSGD and top-k for gradients with the formulas, computed in LibTorch. Ranks are processes
// that Gloo joins.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ops/linalg_qr.h>
#include <gtest/gtest.h>

#include <map>

#include "runtime/comm/sum/low_rank.h"
#include "tests/engine/wire/gradient_methods.h"

namespace tessera::testing {
namespace gradient_formulas_test {

/// Returns a rank's gradients [parameter] of Tiny, on its rows of a batch, computed only with LibTorch.
std::vector<at::Tensor> gradients_of(Tiny& model, const Batch& batch, int rank, int ranks) {
  const std::int64_t rows = batch.tokens.size(0) / ranks;
  const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, rank * rows, rows); };
  model->zero_grad();
  model->forward(part(batch.tokens), part(batch.targets)).backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model->parameters()) gradients.push_back(parameter.grad().to(at::kDouble));
  return gradients;
}

/// Returns the results that replace the sums of `contributions` [rank][parameter].
using Sums = std::function<std::vector<at::Tensor>(const std::vector<std::vector<at::Tensor>>& contributions)>;

/// Returns the values after kTimes steps in one process, with sums made by `sums`.
Values descended(int ranks, const Sums& sums) {
  at::set_num_threads(1);  // one thread, as on_hosts requires
  Tiny model = make_tiny({}, /*deferred=*/false);
  const auto batches = make_batches(6, 24, 5, TinyOptions().vocab);
  for (std::size_t i = 0; i < kTimes; ++i) {
    std::vector<std::vector<at::Tensor>> contributions;
    for (int rank = 0; rank < ranks; ++rank)
      contributions.push_back(gradients_of(model, batches[i % batches.size()], rank, ranks));
    const std::vector<at::Tensor> made = sums(contributions);
    const at::NoGradGuard no_grad;
    const auto parameters = model->parameters();
    for (std::size_t p = 0; p < parameters.size(); ++p) parameters[p].sub_(made[p].to(at::kFloat), kRate / ranks);
  }
  return values_of(*model);
}

/// Computes PowerSGD's formula in LibTorch, in fp64.
class PlainPowerSgd {
 public:
  PlainPowerSgd(int ranks, std::int64_t rank) : rank_(rank), lacked_(static_cast<std::size_t>(ranks)) {}

  std::vector<at::Tensor> operator()(const std::vector<std::vector<at::Tensor>>& contributions) {
    std::vector<at::Tensor> sums;
    for (std::size_t p = 0; p < contributions[0].size(); ++p) {
      at::Tensor sum = at::zeros_like(contributions[0][p]);
      if (sum.dim() == 2 && sum.numel() > (sum.size(0) + sum.size(1)) * rank_) {
        sum = factored(contributions, p);
      } else {
        for (const auto& of_rank : contributions) sum += of_rank[p];
      }
      sums.push_back(sum);
    }
    return sums;
  }

 private:
  at::Tensor factored(const std::vector<std::vector<at::Tensor>>& contributions, std::size_t p) {
    at::Tensor& q = factors_.try_emplace(p, first_factor(p, contributions[0][p].size(1))).first->second;
    std::vector<at::Tensor> wanted;
    at::Tensor left = at::zeros({contributions[0][p].size(0), rank_}, at::kDouble), right = at::zeros_like(q);
    for (std::size_t r = 0; r < contributions.size(); ++r) {
      const at::Tensor& own = contributions[r][p];
      const at::Tensor lacked = lacked_[r].try_emplace(p, at::zeros_like(own)).first->second;
      wanted.push_back(own + lacked);
      left += wanted[r].matmul(q);
    }
    left = std::get<0>(at::linalg_qr(left));
    for (const at::Tensor& own : wanted) right += own.t().matmul(left);
    q = right;
    const at::Tensor sum = left.matmul(right.t());
    for (std::size_t r = 0; r < wanted.size(); ++r)
      lacked_[r][p] = wanted[r] - sum / static_cast<double>(wanted.size());
    return sum;
  }

  at::Tensor first_factor(std::size_t p, std::int64_t columns) const {
    at::Tensor drawn = at::zeros({rank_, columns});
    draw_missing(static_cast<std::int64_t>(p), drawn.mutable_data_ptr<float>(), static_cast<std::size_t>(rank_),
                 static_cast<std::size_t>(columns));
    return drawn.t().to(at::kDouble);
  }

  const std::int64_t rank_;
  std::vector<std::map<std::size_t, at::Tensor>> lacked_;  ///< [rank], by parameter
  std::map<std::size_t, at::Tensor> factors_;
};

TEST(PowerSgd, EqualsItsFormulaUnderEveryStrategy) {
  for (const auto& [ranks, rank] : {std::pair(2, 4), {3, 2}}) {
    const Values wanted = descended(ranks, PlainPowerSgd(ranks, rank));
    on_hosts(ranks, ranks, [&, rank = rank](const Mesh& mesh) {
      FirstValues first;
      const Values exact = trained(mesh, strategy_for(ShardingStrategy::kNoShard, descend), kTimes);
      for (const ShardingStrategy kind : kWhole) {
        const Values values = trained(mesh, strategy_for(kind, power_sgd(rank)), kTimes);
        require(first.same_bits(values), name_of(kind) + " has other bits than NO_SHARD");
        expect_close(values, wanted, 1e-5, name_of(kind));
        require(!::testing::Test::HasFailure(), name_of(kind) + " is not the formula");
        require(distance(values, exact) > 1e-4, name_of(kind) + " was not compressed");
      }
    });
  }
}

TEST(PowerSgd, SumsPlainlyWhereFactorsAreNotShorter) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const Values exact = trained(mesh, strategy_for(ShardingStrategy::kNoShard, descend), kTimes);
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard, power_sgd(12)));
    require(session.engine.allocated()[MemoryCategory::kFeedback] == 0, "nothing is kept");
    for (std::size_t i = 0; i < kTimes; ++i) session.train(i);
    require(all_same_bits(session.values(), exact), "nothing is lost");
    const double rough = distance(trained(mesh, strategy_for(ShardingStrategy::kNoShard, power_sgd(1)), kTimes), exact),
                 fine = distance(trained(mesh, strategy_for(ShardingStrategy::kNoShard, power_sgd(8)), kTimes), exact);
    require(fine < 0.3 * rough, "rank 8 is " + std::to_string(fine) + " away, rank 1 " + std::to_string(rough));
  });
}

/// Computes top-k of each unit of Tiny in LibTorch, in fp64.
class PlainTopK {
 public:
  PlainTopK(int ranks, double share) : share_(share), lacked_(static_cast<std::size_t>(ranks)) {}

  std::vector<at::Tensor> operator()(const std::vector<std::vector<at::Tensor>>& contributions) {
    constexpr std::size_t kOfRoot = 2, kOfBlock = 6;  // numbers of parameters; those of the root come first
    std::vector<at::Tensor> sums;
    for (std::size_t begin = 0; begin < contributions[0].size();) {
      const std::size_t end = begin + (begin == 0 ? kOfRoot : kOfBlock);
      at::Tensor sum;
      for (std::size_t r = 0; r < contributions.size(); ++r) {
        const at::Tensor sent = sent_of(contributions[r], begin, end, lacked_[r][begin]);
        sum = sum.defined() ? sum + sent : sent;
      }
      std::int64_t from = 0;
      for (std::size_t p = begin; p < end; ++p) {
        const at::Tensor& like = contributions[0][p];
        sums.push_back(sum.narrow(0, from, like.numel()).view_as(like));
        from += like.numel();
      }
      begin = end;
    }
    return sums;
  }

 private:
  at::Tensor sent_of(const std::vector<at::Tensor>& gradients, std::size_t begin, std::size_t end, at::Tensor& lacked) {
    std::vector<at::Tensor> flat;
    for (std::size_t p = begin; p < end; ++p) flat.push_back(gradients[p].flatten());
    at::Tensor wanted = at::cat(flat);
    if (lacked.defined()) wanted = wanted + lacked;
    const auto count = static_cast<std::int64_t>(std::ceil(static_cast<double>(wanted.numel()) * share_));
    const at::Tensor indices = std::get<1>(wanted.abs().topk(count));
    const at::Tensor sent = at::zeros_like(wanted).index_copy(0, indices, wanted.index_select(0, indices));
    lacked = wanted - sent;
    return sent;
  }

  const double share_;
  std::vector<std::map<std::size_t, at::Tensor>> lacked_;  ///< [rank], by the unit's first parameter
};

TEST(TopK, EqualsItsFormulaUnderEveryStrategy) {
  for (const int ranks : {2, 3}) {
    constexpr double kShare = 0.1;
    const Values wanted = descended(ranks, PlainTopK(ranks, kShare));
    on_hosts(ranks, ranks, [&](const Mesh& mesh) {
      FirstValues first;
      const Values exact = trained(mesh, strategy_for(ShardingStrategy::kNoShard, descend), kTimes);
      for (const ShardingStrategy kind : kWhole) {
        const Values values = trained(mesh, strategy_for(kind, top_k(kShare)), kTimes);
        require(first.same_bits(values), name_of(kind) + " has other bits than NO_SHARD");
        expect_close(values, wanted, 1e-5, name_of(kind));
        require(!::testing::Test::HasFailure(), name_of(kind) + " is not the formula");
        require(distance(values, exact) > 1e-4, name_of(kind) + " was not compressed");
      }
      // All sums of up to three ranks are added rank by rank, so their bits are the same.
      require(all_same_bits(trained(mesh, strategy_for(ShardingStrategy::kNoShard, top_k(1)), kTimes), exact),
              "all sent");
    });
  }
}

// There are two hosts with two ranks each. Shared memory joins the ranks of a host, and Gloo joins the hosts.
TEST(GradientMethods, FormulasHoldAcrossHostsOfSeveralRanks) {
  const Values factors = descended(4, PlainPowerSgd(4, 2)), largest = descended(4, PlainTopK(4, 0.05));
  on_hosts(4, 2, [&](const Mesh& mesh) {
    for (const ShardingStrategy kind : kWhole) {
      expect_close(trained(mesh, strategy_for(kind, power_sgd(2)), kTimes), factors, 1e-5, name_of(kind));
      expect_close(trained(mesh, strategy_for(kind, top_k(0.05)), kTimes), largest, 1e-5, name_of(kind));
      require(!::testing::Test::HasFailure(), name_of(kind) + " is not the formula");
    }
  });
}

}  // namespace gradient_formulas_test
}  // namespace tessera::testing
