#include "runtime/config/strategy_names.h"

#include <variant>

#include "runtime/config/optimizer_rows.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_table.h"
#include "runtime/config/transport_rows.h"

// This file has the names of all enumerators as the strategy file spells them, each with its description for the
// reference page. It also has small functions that return facts about an update rule or a strategy. The names are only
// in these lists, except those of update rules and transports, which are in the rows of tessera/optimizer_types.h and
// tessera/transports.h.

namespace tessera {
namespace {

template <typename Enum>
std::string name_in(const std::vector<Named<Enum>>& list, Enum value) {
  for (const Named<Enum>& entry : list) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

}  // namespace

const std::vector<Named<ShardingStrategy>>& sharding_strategies() {
  using enum ShardingStrategy;
  static const std::vector<Named<ShardingStrategy>> list = {
      {kNoShard, "NO_SHARD", "everything replicated (stage 0, plain data parallelism)"},
      {kShardOptimizer, "SHARD_OPTIMIZER", "optimizer state sharded (stage 1)"},
      {kShardGradients, "SHARD_GRADIENTS", "gradients and optimizer state sharded (stage 2)"},
      {kShardGradOp, "SHARD_GRAD_OP", "parameters sharded too, but kept gathered from forward to backward"},
      {kFullShard, "FULL_SHARD", "everything sharded, each unit gathered when it is used (stage 3)"},
      {kHybridShard, "HYBRID_SHARD", "FULL_SHARD on the mesh's shard axis, replicated on the other"}};
  return list;
}

const std::vector<Named<SecondaryForm>>& secondary_forms() {
  using enum SecondaryForm;
  static const std::vector<Named<SecondaryForm>> list = {
      {kNone, "none", "there is no second copy; each gather is over the whole shard axis"},
      {kPlain, "plain", "in the type of the parameters, so training has the bits that it has without"},
      {kInt8, "int8",
       "on CPU ranks: one byte an element, and an fp32 scale for every 256 of them; the whole step computes with the "
       "rounded values, each off by at most 1/254 of the largest magnitude among the 256 (and by its type's own "
       "rounding)"}};
  return list;
}

const std::vector<Named<DType>>& training_dtypes() {
  static const std::vector<Named<DType>> list = {
      {DType::kF32, "fp32", "4 bytes"},
      {DType::kBF16, "bf16", "2 bytes, the range of fp32, 8 bits of precision"},
      {DType::kF16, "fp16", "2 bytes, 11 bits of precision, small range: the loss is scaled"}};
  return list;
}

const std::vector<Named<GradientSync>>& gradient_syncs() {
  using enum GradientSync;
  static const std::vector<Named<GradientSync>> list = {
      {kEachMicrobatch, "each_microbatch", "reduced after every microbatch: least memory"},
      {kLastMicrobatch, "last_microbatch", "accumulated unsharded in fp32, reduced once: least communication"}};
  return list;
}

const std::vector<Named<DealBy>>& deals() {
  using enum DealBy;
  static const std::vector<Named<DealBy>> list = {
      {kEven, "even", "each rank computes gradient_accumulation of them"},
      {kSpeed, "speed", "faster ranks compute more, by what was measured, so that all end together"}};
  return list;
}

const std::vector<Named<BufferBroadcast>>& buffer_broadcasts() {
  using enum BufferBroadcast;
  static const std::vector<Named<BufferBroadcast>> list = {
      {kNone, "none", "each rank keeps what its own forwards wrote"},
      {kFromRankZero, "from_rank_zero", "every rank gets rank 0's, as with DDP's broadcast_buffers"},
      {kMean, "mean", "the mean over the ranks of floating-point buffers; of integers and flags rank 0's"},
      {kMicrobatchOrder, "microbatch_order",
       "running statistics of each BatchNorm count all microbatches of the step, in the order of their numbers, as on "
       "one rank; it goes with reproducible"}};
  return list;
}

const std::vector<Named<MasterKind>>& master_kinds() {
  static const std::vector<Named<MasterKind>> list = {
      {MasterKind::kSplitBF16, "split",
       "2 bytes beside the parameter, which is the master's upper half; ties round away from zero"},
      {MasterKind::kF32, "fp32", "4 bytes beside the parameter, which is the master rounded to nearest even"}};
  return list;
}

const std::vector<Named<OptimizerType>>& optimizer_types() {
  static const std::vector<Named<OptimizerType>> list = [] {
    std::vector<Named<OptimizerType>> names;
    for (const OptimizerRow& row : optimizer_rows()) names.push_back({row.type, row.word, row.text});
    return names;
  }();
  return list;
}

std::string name_of_group(const OptimizerConfig& optimizer, std::size_t index) {
  const std::string& name = optimizer.groups[index].name;
  return "group " + std::to_string(index) + (name.empty() ? "" : " (" + name + ")");
}

bool keeps_states(const OptimizerConfig& optimizer) {
  return !has(optimizer.type, optimizer_traits::kOnlyMomentum) || optimizer.momentum > 0;
}

bool updates_whole_tensors(OptimizerType type) {
  return has(type, optimizer_traits::kMatrices | optimizer_traits::kTensors);
}

bool adapts_layers(OptimizerType type) { return has(type, optimizer_traits::kLayers); }

bool gets_whole_sums(const Strategy& strategy) {
  const CutAxes gradients = placement_axes(strategy).gradients;
  if (strategy.placement.is_given()) {  // no sum is made over an axis of one rank
    if (!gradients.rank) return !gradients.host || strategy.mesh.shards() != 1;
    return !gradients.host && strategy.mesh.replicas() != 1;
  }
  return !gradients.rank || strategy.strategy == ShardingStrategy::kHybridShard || strategy.mesh.replicas() > 1;
}

bool keeps_gradients(const CompressionConfig& compression) {
  return compression.error_feedback ||
         std::visit([](const auto& method) { return method.kKeepsGradients; }, compression.method);
}

bool draws_gradients(const CompressionMethod& method) {
  return std::visit(
      [](const auto& each) {
        return requires { each.seed; };
      },
      method);
}

double momentum_of_residuals(const CompressionMethod& method) {
  const auto* const one_bit = std::get_if<OneBitConfig>(&method);
  return one_bit ? one_bit->momentum : 0;
}

std::string describe(const CompressionMethod& method) {
  Strategy strategy;
  strategy.compression.method = method;
  const nlohmann::ordered_json value = find_strategy_key("/compression/method")->field.get(strategy);
  std::string text = value.at(kTypeKey);
  for (const auto& [key, number] : value.items()) {
    if (key != kTypeKey) text += ", " + key + " " + number.dump();
  }
  return text;
}

const std::vector<Named<MuonLrAdjustment>>& muon_lr_adjustments() {
  using enum MuonLrAdjustment;
  static const std::vector<Named<MuonLrAdjustment>> list = {
      {kMatchRmsAdamW, "match_rms_adamw",
       "0.2 times the root of the longer side, so that steps are about as long as adamw's (arXiv 2502.16982)"},
      {kOriginal, "original", "the root of rows over columns where there are more rows, else 1"}};
  return list;
}

const std::vector<Named<DType>>& muon_dtypes() {
  static const std::vector<Named<DType>> list = {
      {DType::kF32, "fp32", "momenta are made orthogonal as they are"},
      {DType::kBF16, "bf16", "they are rounded before and after each product, as PyTorch's Muon does it"}};
  return list;
}

const std::vector<Named<StateDType>>& state_dtypes() {
  using enum StateDType;
  static const std::vector<Named<StateDType>> list = {
      {kF32, "fp32", "4 bytes a number"},
      {kBF16, "bf16", "2 bytes a number, rounded stochastically"},
      {k8Bit, "8bit", "1 byte a number and 4 for every 256, companded, rounded stochastically"}};
  return list;
}

const std::vector<Named<bool>>& shard_overs() {
  static const std::vector<Named<bool>> list = {
      {false, "shard", "optimizer state sharded over the mesh's shard axis, replicated on the other"},
      {true, "world", "optimizer state sharded over all ranks"}};
  return list;
}

const std::vector<Named<LrScheduleType>>& lr_schedule_types() {
  using enum LrScheduleType;
  static const std::vector<Named<LrScheduleType>> list = {
      {kConstant, "constant", "stays at optimizer.lr"},
      {kLinear, "linear", "falls in a straight line, reaching min_ratio at total_steps"},
      {kCosine, "cosine", "falls along half a cosine, reaching min_ratio at total_steps (arXiv 1608.03983)"},
      {kOneCycle, "one_cycle", "rises from initial_ratio, then falls to min_ratio (arXiv 1708.07120)"},
      {kInverseSqrt, "inverse_sqrt", "falls with one over the square root of the step (arXiv 1706.03762)"},
      {kWsd, "wsd", "warm-up, stable, then a decay over the last decay_steps (arXiv 2404.06395)"},
      {kManual, "manual", "stays where Engine::set_lr put it last, optimizer.lr at first"}};
  return list;
}

const std::vector<Named<BatchScaling>>& batch_scalings() {
  static const std::vector<Named<BatchScaling>> list = {
      {BatchScaling::kLinear, "linear", "by the ratio (arXiv 1706.02677)"},
      {BatchScaling::kSquareRoot, "square_root", "by the ratio's square root (arXiv 1404.5997)"}};
  return list;
}

const std::vector<Named<Tier>>& tiers() {
  static const std::vector<Named<Tier>> list = {
      {Tier::kMemory, "memory", "in the memory of the device that trains"},
      {Tier::kHost, "host", "in pinned memory of the host whose GPU trains"},
      {Tier::kNvme, "nvme", "in files of offload.paths, read ahead and written behind the update"},
      {Tier::kAuto, "auto",
       "as much of it below as memory.limit makes necessary: moments, then masters, then parameters; on nvme, or where "
       "a GPU trains and there are no offload.paths, on host"}};
  return list;
}

const std::vector<Named<Tier>>& state_tiers() {
  static const std::vector<Named<Tier>> list = {
      {Tier::kMemory, "memory", "in the memory of the device that trains"},
      {Tier::kHost, "host", "in pinned memory of the host whose GPU trains, updated as offload.step says"},
      {Tier::kNvme, "nvme", "in files of offload.paths, read ahead and written behind the update"},
      {Tier::kAuto, "auto",
       "as much of it below as memory.limit makes necessary: on nvme, moments, then masters, then parameters; where a "
       "GPU trains and there are no offload.paths, on host, masters and moments of the same elements"}};
  return list;
}

const std::vector<Named<Tier>>& gradient_tiers() {
  static const std::vector<Named<Tier>> list = {
      {Tier::kMemory, "memory", "in the memory of the device that trains"},
      {Tier::kHost, "host", "in pinned memory of the host whose GPU trains"},
      {Tier::kNvme, "nvme", "in files of offload.paths; a GPU's by way of its host's memory"}};
  return list;
}

const std::vector<Named<WireForm>>& wire_forms() {
  static const std::vector<Named<WireForm>> list = {
      {WireForm::kPlain, "none", "as they are"},
      {WireForm::kInt8, "int8", "one byte an element, and an fp32 scale for every 256 of them"},
      {WireForm::kInt4, "int4", "half a byte an element, and an fp32 scale for every 256 of them"},
      {WireForm::kLossless, "lossless",
       "packed, with all bits: what exponents have in common is sent once. Gradients and weights take about 0.85 of "
       "the bytes in fp32 and 0.7 in bf16, and of an embedding's gradients those rows that are not zero. Over Gloo "
       "alone"}};
  return list;
}

const std::vector<Named<CompressedAxes>>& compressed_axes() {
  static const std::vector<Named<CompressedAxes>> list = {
      {CompressedAxes::kBoth, "both", "the shard and the replicate axis"},
      {CompressedAxes::kReplicate, "replicate", "the replicate axis"},
      {CompressedAxes::kShard, "shard", "the shard axis"}};
  return list;
}

const std::vector<Named<SpikeAction>>& spike_actions() {
  static const std::vector<Named<SpikeAction>> list = {
      {SpikeAction::kNone, "none", "it is made as any other"},
      {SpikeAction::kSkip, "skip", "it is skipped on all ranks, as for an overflow, with a warning"},
      {SpikeAction::kRollback, "rollback",
       "it is skipped, and the last checkpoint that was saved or loaded is loaded, while data and step numbers go on; "
       "at most three times the same one"}};
  return list;
}

const std::vector<Named<SyncType>>& sync_types() {
  static const std::vector<Named<SyncType>> list = {
      {SyncType::kEachStep, "each_step", "gradients are summed over them in every step"},
      {SyncType::kLocalSgd, "local_sgd",
       "each trains by itself, and in outer steps weights are averaged (arXiv 1805.09767)"},
      {SyncType::kPostLocalSgd, "post_local_sgd",
       "as each_step for start_step steps, then as local_sgd (arXiv 1808.07217)"},
      {SyncType::kDiloco, "diloco",
       "each trains by itself, and in outer steps SGD with Nesterov momentum steps along what weights have moved on "
       "average (arXiv 2311.08105)"},
      {SyncType::kStreamingDiloco, "streaming_diloco",
       "as diloco, but a fragment of the model at a time, whose outer gradients go beside the next steps (arXiv "
       "2501.18512)"},
      {SyncType::kAsynchronous, "asynchronous",
       "each rank is a replica and applies its gradients at once to parameters that all own together; none waits for "
       "another"},
      {SyncType::kHogwild, "hogwild",
       "the same in one copy of the parameters, which every rank reads and writes whenever it is ready, without locks "
       "(arXiv 1106.5730)"},
      {SyncType::kBackups, "backups",
       "a step sums the gradients of the ranks that come first, all but `count` of them; gradients that come later are "
       "dropped (arXiv 1604.00981)"}};
  return list;
}

const std::vector<Named<StateSharing>>& state_sharings() {
  static const std::vector<Named<StateSharing>> list = {
      {StateSharing::kOwn, "own", "each rank has all states for itself, made of its own gradients"},
      {StateSharing::kShared, "shared", "there is one set of states, which the gradients of every rank move"}};
  return list;
}

const std::vector<Named<ShardOwners>>& shard_owners() {
  static const std::vector<Named<ShardOwners>> list = {
      {ShardOwners::kRanks, "ranks", "the ranks of one host, in memory that all of them map"},
      {ShardOwners::kServers, "servers",
       "parameter servers, processes that compute nothing else (`tessera launch --servers`, `tessera serve`)"}};
  return list;
}

const std::vector<Named<AgeScale>>& age_scales() {
  static const std::vector<Named<AgeScale>> list = {
      {AgeScale::kNone, "none", "it is applied as it is"},
      {AgeScale::kInverse, "inverse", "it is divided by 1 + its age (arXiv 1511.05950)"}};
  return list;
}

const std::vector<Named<OffloadedStep>>& offloaded_steps() {
  static const std::vector<Named<OffloadedStep>> list = {
      {OffloadedStep::kAuto, "auto",
       "cpu or gpu: what takes less time by what is measured when the Engine is made, the same on all ranks; the log "
       "says which, with the figures. gpu where cpu is refused and for a rule of the program's (own), cpu where only "
       "its plan fits memory.limit, and gpu with \"durable\" and a tier auto, where nothing may depend on measuring. "
       "Else a plan that is made without the GPU is that of gpu"},
      {OffloadedStep::kCpu, "cpu",
       "the host's CPU, with the kernel that the CPU trains with, where they lie. Sums of gradients come to the host "
       "as soon as they are made, and new parameters go to the GPU"},
      {OffloadedStep::kGpu, "gpu", "the GPU: each step brings all records there and takes them back"}};
  return list;
}

const std::vector<Named<TransportChoice>>& transport_choices() {
  static const std::vector<Named<TransportChoice>> list = [] {
    std::vector<Named<TransportChoice>> names = {
        {TransportChoice::kAuto, "auto", "on the CPU: host inside a host, gloo across hosts"}};
    for (const TransportRow& row : transport_rows()) names.push_back({row.choice, row.word, row.text});
    return names;
  }();
  return list;
}

const std::vector<Named<NcclBuffers>>& nccl_buffers() {
  using enum NcclBuffers;
  static const std::vector<Named<NcclBuffers>> list = {
      {kPlain, "plain", "as any other memory: NCCL copies through buffers of its own"},
      {kRegistered, "registered",
       "made by NCCL and registered with it, where the GPU has multicast memory; else plain"}};
  return list;
}

std::string name_of(ShardingStrategy strategy) { return name_in(sharding_strategies(), strategy); }
std::string name_of(OptimizerType type) { return name_in(optimizer_types(), type); }
std::string name_of(StateDType dtype) { return name_in(state_dtypes(), dtype); }
std::string name_of(LrScheduleType type) { return name_in(lr_schedule_types(), type); }
std::string name_of(BatchScaling scaling) { return name_in(batch_scalings(), scaling); }
std::string name_of(SyncType type) { return name_in(sync_types(), type); }
std::string name_of(WireForm form) { return name_in(wire_forms(), form); }
std::string name_of(MuonLrAdjustment adjustment) { return name_in(muon_lr_adjustments(), adjustment); }

}  // namespace tessera
