// DeepSpeed: "zero_optimization", but for offload.

#include <algorithm>

#include "app/import/import_formats.h"

namespace tessera::app {

const char kUnitsNote[] =
    "Name the model's block in \"units\", such as {\"classes\": [\"LlamaDecoderLayer\"]}. Without units the whole "
    "model is gathered at once. (TesseraTrainer "
    "takes the blocks from the model.)";

namespace {

const std::string kZero = "zero_optimization.";
constexpr std::int64_t kLastStage = 3;

const char* strategy_of_stage(std::int64_t stage) {
  constexpr const char* kNames[] = {"NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "FULL_SHARD"};
  return kNames[stage];
}

std::int64_t mics_shards(const ImportSession& session) {
  const JsonNode* size = session.find(kZero + "mics_shard_size");
  return size == nullptr ? 0 : integer_of(*size).value_or(0);
}

void stage(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> number = integer_of(*key.node);
  if (!number || *number < 0 || *number > kLastStage) return session.refused(key, "must be 0, 1, 2 or 3");
  const bool hybrid = *number == kLastStage && mics_shards(session) > 0;
  session.put(key, "/strategy", hybrid ? "HYBRID_SHARD" : strategy_of_stage(*number),
              hybrid ? "mics_shard_size makes it hybrid" : "");
}

void mics_shard_size(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> size = integer_of(*key.node);
  if (!size) return session.refused(key, "must be an integer");
  if (*size <= 0) return session.ignored(key, "off");
  const JsonNode* number = session.find(kZero + "stage");
  if (number == nullptr || integer_of(*number) != kLastStage)
    return session.refused(key, "MiCS needs stage 3, which becomes HYBRID_SHARD");
  session.put(key, "/mesh/shard", *size);
}

// ZeRO of old files: true is stage 1.
void old_form(ImportSession& session, const ConfigKey& key) {
  const std::optional<bool> on = bool_of(*key.node);
  if (!on) return session.refused(key, "must be an object with keys of its own");
  session.put(key, "/strategy", strategy_of_stage(*on ? 1 : 0));
}

void prefetch_size(ImportSession& session, const ConfigKey& key) {
  if (number_of(*key.node) == 0.0) {
    session.put(key, "/prefetch", 0);
    return;
  }
  const std::optional<std::int64_t> elements = integer_of(*key.node);
  if (!elements)
    return session.ignored(key, "prefetch says how many units are gathered ahead, and is 1; or prefetch_bytes does");
  const bool is_narrow = deepspeed_trains_in(session, "bf16") || deepspeed_trains_in(session, "fp16");
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  session.put(key, "/prefetch_bytes", std::min(*elements, kMost) * (is_narrow ? 2 : 4));
}

ImportRow zero_ignores(const std::string& name, const std::string& why) { return ignores(kZero + name, why); }

ImportRow zero_off(const std::string& name, const std::string& refusal) {
  return expects(kZero + name, false, "off", refusal);
}

constexpr char kWeightsTravel[] =
    "parameters travel in the type of mixed_precision.param. Use bf16, which is 2 bytes; or, on CPUs, "
    "compression.gathers, whose codes are others than DeepSpeed's";
constexpr char kGradientsTravel[] =
    "gradients travel in the type of mixed_precision.reduce. Use bf16; or compression.gradients, whose codes are "
    "others "
    "than DeepSpeed's";
constexpr char kSlots[] = "Tessera gathers units: prefetch + 1 of them, and the root, are in memory at a time";
constexpr char kWhole[] =
    "a unit is gathered as a whole: units.classes, units.modules or units.min_numel say which modules are units";
constexpr char kExport[] =
    "weights are gathered when the program asks: save_weights, export_safetensors or `tessera checkpoint export`";

std::vector<ImportRow> reduction_rows() {
  return {
      zero_ignores("contiguous_gradients", "Tessera's gradients lie in flat buffers always"),
      zero_ignores("reduce_scatter", "the strategy says which collective reduces gradients"),
      zero_ignores("reduce_bucket_size",
                   "a unit's gradients are one bucket; with NO_SHARD units.bucket_cap_mb makes others"),
      zero_ignores("allgather_bucket_size", "a unit is gathered with one call"),
      zero_ignores("allgather_partitions", "Tessera gathers with all-gather always"),
      zero_ignores("use_multi_rank_bucket_allreduce", "a unit's gradients are reduced with one call"),
      zero_ignores(
          "overlap_comm",
          "Tessera reduces and gathers beside the computation always; reductions_ahead and prefetch say how far"),
      zero_ignores("round_robin_gradients", "a unit's gradients are reduced as soon as they are there"),
      zero_ignores("ignore_unused_parameters",
                   "parameters that no rank used take part with zeros, and are not waited for in later steps"),
      zero_ignores("legacy_stage1", "there is one implementation"),
      zero_ignores("elastic_checkpoint", "checkpoints load on any number of ranks"),
      zero_ignores("load_from_fp32_weights", "checkpoints have fp32 master weights"),
  };
}

std::vector<ImportRow> stage3_rows() {
  std::vector<ImportRow> rows;
  for (const std::string prefix : {"", "stage3_"}) {
    rows = std::move(rows) +
           std::vector<ImportRow>{
               by_rule(kZero + prefix + "prefetch_bucket_size",
                       "0: `prefetch` 0; a number of elements: `prefetch_bytes`, what they take; \"auto\": ignored",
                       prefetch_size),
               zero_ignores(prefix + "param_persistence_threshold",
                            "small parameters belong to a unit as others do, and cost no call of their own"),
               zero_ignores(prefix + "model_persistence_threshold",
                            "small parameters belong to a unit as others do, and cost no call of their own"),
               zero_ignores(prefix + "max_live_parameters", kSlots),
               zero_ignores(prefix + "max_reuse_distance",
                            "Tessera records the order of units, and keeps those that are needed first"),
               zero_ignores(prefix + "gather_16bit_weights_on_model_save", kExport),
               zero_ignores(prefix + "module_granularity_threshold", kWhole),
               zero_ignores(prefix + "use_all_reduce_for_fetch_params", "a unit is gathered with one all-gather"),
               zero_ignores(prefix + "allgather_sequential", "units are gathered one by one, in place"),
           };
  }
  return std::move(rows) +
         std::vector<ImportRow>{
             zero_ignores("stage3_gather_fp16_weights_on_model_save", kExport),
             zero_ignores("sub_group_size",
                          "the update goes through memory in one pass; offload.record says how much is moved to and "
                          "from disks at once"),
             zero_ignores("memory_efficient_linear", "Tessera keeps no copies of gathered parameters for backward"),
             zero_ignores("override_module_apply", "modules stay as they are"),
             zero_ignores("log_trace_cache_warnings", "it changes what is logged"),
             zero_ignores("enable_sanity_checks", "checks are the strategy's \"check\""),
             zero_ignores("pipeline_loading_checkpoint", "it changes how a checkpoint is read"),
             zero_ignores("leaf_module.*", kWhole),
             zero_ignores("save_muon_momentum_buffer_in_memory", "offload.moments says where Tessera keeps it"),
         };
}

void secondary_shards(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> size = integer_of(*key.node);
  if (size && *size <= 1) return session.ignored(key, "off");
  session.refused(key,
                  "Tessera keeps no second copy of parameters for backward. HYBRID_SHARD with mesh.shard shards over "
                  "so many ranks, and with "
                  "optimizer.shard_over \"world\" keeps gradients and states over all");
}

}  // namespace

std::vector<ImportRow> deepspeed_zero_rows() {
  return std::vector<ImportRow>{
             by_rule("zero_optimization",
                     "true: `strategy` \"SHARD_OPTIMIZER\"; false: \"NO_SHARD\" (the form of old files)", old_form),
             by_rule(kZero + "stage",
                     "0, 1, 2, 3: `strategy` \"NO_SHARD\", \"SHARD_OPTIMIZER\", \"SHARD_GRADIENTS\", \"FULL_SHARD\"; 3 "
                     "with `mics_shard_size`: \"HYBRID_SHARD\"",
                     stage),
             by_rule(kZero + "mics_shard_size", "above 0, with stage 3: `strategy` \"HYBRID_SHARD\" and `mesh.shard`",
                     mics_shard_size),
             zero_ignores("mics_hierarchical_params_gather", "Tessera chooses how groups that span hosts gather"),
             by_rule(kZero + "zero_hpz_partition_size",
                     "1: ignored; above: refused, as there is no second copy of parameters", secondary_shards),
             zero_off("zero_quantized_weights", kWeightsTravel),
             zero_off("zero_quantized_gradients", kGradientsTravel),
             zero_off("zero_quantized_nontrainable_weights",
                      "frozen parameters have the type that mixed_precision.param says"),
             refuses(kZero + "zeropp_loco_param.*", kGradientsTravel),
             refuses(kZero + "zenflow.*",
                     "ZenFlow updates with gradients of earlier steps, which changes training. offload with tier "
                     "\"nvme\" moves states beside the "
                     "computation, and optimizer.in_backward updates during backward"),
         } +
         reduction_rows() + stage3_rows();
}

void finish_deepspeed_zero(ImportSession& session) {
  if (session.find(kZero + "stage") == nullptr)
    session.imply("/strategy", "NO_SHARD", "DeepSpeed's default is stage 0");
  const auto strategy = session.settings().find("/strategy");
  const bool gathers =
      strategy != session.settings().end() && (strategy->second == "FULL_SHARD" || strategy->second == "HYBRID_SHARD");
  if (gathers && !session.is_set("/units/classes")) session.note(kUnitsNote);
}

}  // namespace tessera::app
