#include "workshop/app/train/played_order.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "engine/asynchronous/push_order.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"

namespace tessera::app {
namespace {

constexpr int kMostThreads = 256;

/// Returns the number of ranks that train in this process. If an order has more than kMostThreads, the number is 1, and
/// the Engine refuses the order.
int ranks_of_process(const Strategy& strategy, const Topology& topology) {
  const AsynchronousConfig& config = strategy.sync.asynchronous;
  if (config.play_order.empty() || config.owners != ShardOwners::kRanks || topology.launcher != "single") return 1;
  const int ranks = value_or_throw(read_order_head(config.play_order)).ranks;
  return ranks >= 1 && ranks <= kMostThreads ? ranks : 1;
}

}  // namespace

int on_ranks_of_this_process(const Strategy& strategy, const Mesh& of_process,
                             const std::function<int(const Mesh&)>& train) {
  const int ranks = ranks_of_process(strategy, of_process.topology());
  if (ranks == 1) return train(of_process);
  int code = 0;
  run_ranks({.ranks = ranks, .timeout_s = strategy.comm.timeout_s}, [&](const Mesh& mesh) {
    set_log_rank(mesh.rank(), ranks);
    const int own = train(mesh);
    if (mesh.rank() == 0) code = own;
  });
  return code;
}

absl::Status check_played(const models::ModelConfig& model, const Strategy& strategy, const Topology& topology) {
  const auto* const gpt = std::get_if<models::GPTConfig>(&model);
  const bool drops = gpt != nullptr && gpt->dropout > 0;
  if (topology.launcher != "thread" || (!drops && strategy.checkpoint.dir.empty())) return absl::OkStatus();
  const std::string ranks = std::to_string(topology.world_size);
  return make_error(ExitCode::kUsage,
                    "train: no launcher has started this process, so it plays the order of " + ranks +
                        " ranks alone, which goes without dropout and checkpoint.dir. [T1098] hint: start it by "
                        "tessera launch -n " +
                        ranks);
}

TrainCommand with_own_steps(TrainCommand command, const Strategy& strategy, int rank) {
  const std::string& order = strategy.sync.asynchronous.play_order;
  if (order.empty()) return command;
  const OrderHead head = value_or_throw(read_order_head(order));
  const auto own = static_cast<std::size_t>(rank);
  if (own >= head.steps.size()) return command;  // the Engine refuses an order of other ranks
  if (!strategy.checkpoint.dir.empty() || command.evaluation.every > 0)
    throw Error(ExitCode::kUsage,
                "train: ranks that play " + order +
                    " make different numbers of steps, so they cannot meet between two steps. [T1097] hint: leave "
                    "--checkpoint-dir and --eval-every out; --eval-data and --save-weights alone are for the end");
  if (const std::int64_t most = std::ranges::max(head.steps); command.steps < most)
    throw Error(ExitCode::kUsage,
                "train: --steps " + std::to_string(command.steps) + " would cut " + order +
                    " short, and ranks would wait for turns that never come. [T1099] hint: give --steps " +
                    std::to_string(most) + ", which is the most that a rank makes in this order");
  command.steps = head.steps[own];
  return command;
}

}  // namespace tessera::app
