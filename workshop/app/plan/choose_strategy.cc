#include "workshop/app/plan/choose_strategy.h"

#include <algorithm>
#include <optional>

#include "engine/memory/make_plan.h"
#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "runtime/config/strategy_names.h"
#include "tessera/error.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

constexpr ShardingStrategy kStrategies[] = {ShardingStrategy::kNoShard,        ShardingStrategy::kShardOptimizer,
                                            ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp,
                                            ShardingStrategy::kFullShard,      ShardingStrategy::kHybridShard};

bool gathers_by_unit(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kFullShard || strategy == ShardingStrategy::kHybridShard;
}

/// The values that are tried for each key, in addition to its value in `like`.
struct Choices {
  std::vector<std::int64_t> prefetch, accumulations;
  std::vector<CompressionConfig> compression;
};

Choices choices_of(const Strategy& like, const Topology& topology, std::span<const std::int64_t> accumulations) {
  Choices choices{{like.prefetch}, {accumulations.begin(), accumulations.end()}, {like.compression}};
  for (const std::int64_t prefetch : {1, 2, 4}) {
    if (prefetch != like.prefetch) choices.prefetch.push_back(prefetch);
  }
  if (accumulations.empty()) choices.accumulations = {like.gradient_accumulation};
  if (topology.world_size == topology.local_world_size || compresses(like.compression)) return choices;
  for (const WireForm form : {WireForm::kLossless, WireForm::kInt8, WireForm::kInt4}) {
    choices.compression.emplace_back(like.compression).gradients = form;
  }
  return choices;
}

/// Sets the codec of gathers. The codec is kPlain if the strategy does not allow the given codec. If no codec is given
/// and `packs` is true, the codec is kLossless. Otherwise the given codec is used.
void choose_gathers(Strategy& candidate, bool packs) {
  WireForm& gathers = candidate.compression.gathers;
  if (candidate.strategy == ShardingStrategy::kNoShard || (is_lossy(gathers) && !gathers_by_unit(candidate.strategy))) {
    gathers = WireForm::kPlain;
  } else if (gathers == WireForm::kPlain && packs) {
    gathers = WireForm::kLossless;
  }
}

std::vector<Strategy> candidates_of(const Strategy& like, const Topology& topology,
                                    std::span<const std::int64_t> accumulations) {
  const Choices choices = choices_of(like, topology, accumulations);
  const bool has_replicas = topology.local_world_size > 1 && topology.world_size > topology.local_world_size;
  std::vector<Strategy> candidates;
  for (const ShardingStrategy kind : kStrategies) {
    if (kind == ShardingStrategy::kHybridShard && !has_replicas) continue;
    for (const std::int64_t accumulation : choices.accumulations) {
      for (const CompressionConfig& compression : choices.compression) {
        for (const std::int64_t prefetch : choices.prefetch) {
          Strategy& candidate = candidates.emplace_back(like);
          candidate.strategy = kind;
          candidate.placement = {};
          if (kind != ShardingStrategy::kFullShard) candidate.secondary = {};
          candidate.gradient_accumulation = accumulation;
          candidate.compression = compression;
          const bool is_new = compression.gradients != like.compression.gradients;
          if (is_new && gets_whole_sums(candidate))
            candidate.compression.sums = is_lossy(compression.gradients) ? WireForm::kInt8 : WireForm::kLossless;
          choose_gathers(candidate, /*packs=*/is_new && !is_lossy(compression.gradients));
          candidate.prefetch = prefetch;
          if (prefetch != like.prefetch) candidate.prefetch_bytes = 0;
          if (!gathers_by_unit(kind)) break;
        }
      }
    }
  }
  return candidates;
}

std::string text_of(const CompressionConfig& compression) {
  if (compression.has_method()) return describe(compression.method);
  const std::string gathers =
      compression.gathers == WireForm::kPlain ? "" : ", gathers " + name_of(compression.gathers);
  if (!compresses(compression)) return "as they are" + gathers;
  return name_of(compression.gradients) + ", sums " + name_of(compression.sums) + gathers;
}

}  // namespace

std::vector<TriedStrategy> try_strategies(const models::ModelConfig& config, const Strategy& like,
                                          const Topology& topology, const TimingFiles& files,
                                          std::span<const std::int64_t> accumulations) {
  const ModelShapes model(config);
  std::vector<TriedStrategy> tried;
  std::optional<Error> refusal;
  for (const Strategy& candidate : candidates_of(like, topology, accumulations)) {
    std::optional<MemoryPlan> plan;
    try {
      plan = model.plan(Strategy::from_json(candidate.to_json(), "auto"), topology);
    } catch (const Error& error) {
      if (error.exit_code() != ExitCode::kConfig) throw;
      refusal = error;  // this candidate does not fit the other keys
      continue;
    }
    TriedStrategy& each = tried.emplace_back();
    each.strategy = candidate;
    each.bytes = plan->use().limited();
    each.fits = like.memory.limit_bytes <= 0 || each.bytes <= like.memory.limit_bytes;
    each.step = predicted_step(*plan, files, topology.local_world_size);
  }
  if (tried.empty()) throw Error(refusal->exit_code(), refusal->message());
  std::ranges::stable_sort(tried, [](const TriedStrategy& a, const TriedStrategy& b) {
    return a.fits != b.fits ? a.fits : a.seconds_a_microbatch() < b.seconds_a_microbatch();
  });
  return tried;
}

std::string text_of_prefetch(const Strategy& strategy) {
  return strategy.prefetch_bytes > 0 ? format_bytes(strategy.prefetch_bytes) : std::to_string(strategy.prefetch);
}

std::string to_text(std::span<const TriedStrategy> tried) {
  constexpr std::size_t kMost = 12;
  TextTable table({left_column("strategy"), right_column("prefetch"), right_column("microbatches"),
                   left_column("on the wire"), right_column("s a step"), right_column("s a microbatch"),
                   right_column("a rank needs"), left_column("bound by"), left_column("fits")});
  for (const TriedStrategy& each : tried.first(std::min(kMost, tried.size()))) {
    const Strategy& strategy = each.strategy;
    table.add_row({name_of(strategy.strategy), gathers_by_unit(strategy.strategy) ? text_of_prefetch(strategy) : "",
                   std::to_string(strategy.gradient_accumulation), text_of(strategy.compression),
                   number_text(each.step.seconds, "%.4f"), number_text(each.seconds_a_microbatch(), "%.4f"),
                   format_bytes(each.bytes), name_of(each.step.bound), each.fits ? "yes" : "no"});
  }
  std::string text = table.to_string();
  if (tried.size() > kMost)
    text += "and " + std::to_string(tried.size() - kMost) + " more, which are slower or do not fit\n";
  const TriedStrategy& best = tried.front();
  if (best.fits) {
    text += "the fastest that fits: " + name_of(best.strategy.strategy) + ", on the wire " +
            text_of(best.strategy.compression) + "; " + number_text(best.step.seconds, "%.4f") +
            " s a step. In fewer bits (int8, int4) gradients are not exact\n";
  }
  for (const std::string& left_out : best.step.left_out) text += "not counted: " + left_out + "\n";
  return text;
}

nlohmann::ordered_json to_json(std::span<const TriedStrategy> tried) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const TriedStrategy& each : tried) {
    json.push_back({{"fits", each.fits},
                    {"total_bytes", each.bytes},
                    {"seconds_a_microbatch", each.seconds_a_microbatch()},
                    {"step", to_json(each.step)},
                    {"strategy", nlohmann::ordered_json::parse(each.strategy.to_json())}});
  }
  return json;
}

}  // namespace tessera::app
