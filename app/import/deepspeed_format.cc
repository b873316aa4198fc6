// DeepSpeed: all keys but those of the tables for ZeRO, offload, types, optimizer and scheduler. The names are those that
// DeepSpeedConfig reads.

#include "app/import/import_formats.h"

namespace tessera::app {
namespace {

std::optional<std::int64_t> count_of(const ImportSession& session, const std::string& name) {
  const JsonNode* node = session.find(name);
  return node == nullptr ? std::nullopt : integer_of(*node);
}

constexpr char kTotal[] = "train_batch_size", kMicro[] = "train_micro_batch_size_per_gpu",
               kRounds[] = "gradient_accumulation_steps";

// samples of a step = samples of a microbatch x microbatches x ranks.
void batch_size(ImportSession& session, const ConfigKey& key) {
  const auto total = count_of(session, kTotal), micro = count_of(session, kMicro), rounds = count_of(session, kRounds);
  if (!integer_of(*key.node) || *integer_of(*key.node) < 1)
    return session.refused(key, "must be an integer of at least 1");
  const std::string plain = "batches are the program's (`tessera train --batch`)";
  if (!total || !micro || *total < 1 || *micro < 1) return session.ignored(key, plain);
  const std::int64_t of_a_rank = *micro * rounds.value_or(1);
  if (of_a_rank < 1 || *total % of_a_rank != 0)
    return session.refused(key, std::string(kTotal) + " must be " + kMicro + " x " + kRounds + " x ranks, and " +
                                    std::to_string(*total) + " is no multiple of " + std::to_string(*micro) + " x " +
                                    std::to_string(rounds.value_or(1)));
  const std::string ranks = std::to_string(*total / of_a_rank);
  if (rounds) return session.ignored(key, plain + ". The sizes agree for " + ranks + " ranks");
  session.ignored(key, plain + ". gradient_accumulation is 1, which is right for " + ranks +
                           " ranks; for N ranks set it to " + ranks + " / N");
}

void monitor(ImportSession& session, const ConfigKey& key, const std::string& instead) {
  session.ignored(key, "what is logged does not change training. " + instead);
}

ImportRow monitor_section(const std::string& name, const std::string& instead) {
  return by_rule(name + ".*", "ignored: " + instead,
                 [instead](ImportSession& session, const ConfigKey& key) { monitor(session, key, instead); });
}

std::vector<ImportRow> batch_rows() {
  const std::string doc = "ignored: batches are the program's. Refused where the three sizes contradict each other";
  return {
      by_rule(kTotal, doc, batch_size),
      by_rule(kMicro, doc, batch_size),
      sets(kRounds, "/gradient_accumulation"),
      expects(
          "managed_gradient_accumulation", true, "Tessera counts microbatches too",
          "Tessera counts microbatches itself: set gradient_accumulation, and call Engine::step when step_is_due()"),
      ignores("dataloader_drop_last",
              "data is the program's; `tessera train --tail` says what becomes of an epoch's last step"),
      sets("gradient_clipping", "/gradient_clipping"),
      ignores("prescale_gradients",
              "gradients are summed in fp32 and divided once, in the update, so there is no overflow to prevent"),
      ignores("gradient_predivide_factor", "gradients are summed in fp32 and divided once, in the update"),
      expects("gradient_allreduce_op", "mean", "Tessera takes the mean too",
              "Tessera takes the mean over the ranks. Multiply the loss by the number of ranks for the sum"),
      expects("sparse_gradients", false, "off",
              "Tessera's gradients are dense. Make embeddings with sparse false: the gradients are the same numbers"),
      ignores("disable_allgather", "DeepSpeed does not read it any more"),
  };
}

std::vector<ImportRow> log_rows() {
  return {
      ignores("steps_per_print", "what is printed does not change training. Use `tessera train --log-every N`"),
      ignores("wall_clock_breakdown", "what is printed does not change training. Use `tessera train --trace`"),
      ignores("memory_breakdown", "what is printed does not change training. `tessera plan` says what memory is for"),
      ignores("dump_state",
              "what is printed does not change training. `tessera train --out` writes the resolved strategy"),
      ignores("log_level", "what is printed does not change training"),
      monitor_section("tensorboard", "Use `tessera train --tensorboard FOLDER`, or MetricsFile::in_tensorboard"),
      monitor_section("csv_monitor", "Use `tessera train --metrics NAME.csv`"),
      monitor_section("wandb", "Use `tessera train --metrics FILE`, JSON lines that a script can send there"),
      monitor_section("comet", "Use `tessera train --metrics FILE`, JSON lines that a script can send there"),
      monitor_section("comms_logger", "Use `tessera train --trace`; `tessera plan` counts calls and bytes"),
      monitor_section("flops_profiler", "Use `tessera train --trace`"),
      monitor_section("timers", "Use `tessera train --trace`"),
  };
}

constexpr char kRecompute[] = "recomputation is the program's: it calls tessera::checkpoint (tessera/recompute.h)";

std::vector<ImportRow> activation_rows() {
  const std::string section = "activation_checkpointing.";
  return {
      ignores(section + "partition_activations",
              std::string(kRecompute) + ", and there is no tensor parallelism to partition over"),
      ignores(section + "contiguous_memory_optimization", kRecompute),
      ignores(section + "number_checkpoints", kRecompute),
      ignores(section + "synchronize_checkpoint_boundary", kRecompute),
      ignores(section + "profile", kRecompute),
      expects(section + "cpu_checkpointing", false, "off",
              "training on a GPU, set offload.activations.tier \"host\": what forward keeps then lies in the host's "
              "memory. "
              "On the CPU leave it out, as its memory is the host's"),
  };
}

std::vector<ImportRow> checkpoint_rows() {
  return {
      ignores("checkpoint.tag_validation", "ranks agree on a checkpoint's name always"),
      ignores("checkpoint.load_universal", "checkpoints load on any number of ranks always"),
      expects("checkpoint.use_node_local_storage", false, "off",
              "a checkpoint is one folder that all ranks see. Save to storage that hosts share"),
      ignores("checkpoint.parallel_write.pipeline_stage", "all ranks write side by side always"),
      switched_off("nebula", "set \"checkpoint\": {\"async\": true}: a save copies the state, and a thread writes it"),
      refuses("datastates_ckpt.*",
              "set \"checkpoint\": {\"async\": true}: a save copies the state, and a thread writes it"),
      ignores("aio.*", "it tunes DeepSpeed's reader. offload.record and offload.queue_depth tune Tessera's"),
  };
}

constexpr char kParallel[] =
    "Tessera shards data-parallel training, and has no tensor, pipeline, sequence or expert parallelism";

ImportRow parallel_size(const std::string& name) { return expects(name, 1.0, "off", kParallel); }

std::vector<ImportRow> absent_rows() {
  return {
      switched_off("elasticity",
                   "batches stay as the program makes them. A checkpoint goes on with another number of ranks; "
                   "`tessera launch --max-restarts` starts ranks again"),
      switched_off("autotuning",
                   "`tessera plan` says what a strategy needs, and `tessera bench buckets` measures buckets"),
      switched_off("curriculum_learning", "data is the program's: give it sequences of the length that it wants"),
      switched_off("data_efficiency", "data is the program's"),
      switched_off("progressive_layer_drop", "which layers run is the model's"),
      switched_off("eigenvalue", "it belongs to quantized training, which Tessera has not"),
      refuses("quantize_training.*", "Tessera does not quantize weights in training"),
      refuses("compression_training.*", "Tessera does not prune or quantize weights in training"),
      refuses("weight_quantization.*", "Tessera does not quantize weights"),
      refuses("sparse_attention.*", "attention is the model's"),
      switched_off("hybrid_engine",
                   "Tessera does not generate text while it trains. Evaluate with Engine::evaluate, or sample from "
                   "exported weights"),
      refuses("compile.*", "Tessera runs the module as it is, without torch.compile"),
      expects("graph_harvesting", false, "off", "Tessera runs without CUDA graphs"),
      refuses("pipeline.*", kParallel),
      refuses("tensor_parallel.*", kParallel),
      switched_off("expert_parallel", kParallel),
      parallel_size("sequence_parallel_size"),
      parallel_size("data_parallel_size"),
      expects("use_data_before_expert_parallelism", false, "off", kParallel),
      ignores("zero_allow_untested_optimizer", "Tessera's optimizers train under every strategy"),
      ignores("zero_force_ds_cpu_optimizer", "Tessera has one optimizer for each rule"),
      ignores("$schema", "it is for editors"),
  };
}

}  // namespace

ImportFormat deepspeed_format() {
  return {"deepspeed", "a DeepSpeed configuration",
          batch_rows() + deepspeed_zero_rows() + deepspeed_offload_rows() + deepspeed_precision_rows() +
              deepspeed_optimizer_rows() + deepspeed_scheduler_rows() + log_rows() + activation_rows() +
              checkpoint_rows() + absent_rows(),
          [](const std::string& path) { return path; },
          [](ImportSession& session) {
            finish_deepspeed_zero(session);
            finish_deepspeed_precision(session);
            finish_deepspeed_scheduler(session);
            finish_deepspeed_optimizer(session);
            finish_deepspeed_clipping(session);
          }};
}

void finish_deepspeed_clipping(ImportSession& session) {
  if (session.find("gradient_clipping") == nullptr)
    session.note(
        "The file says no gradient_clipping. DeepSpeed clips at 1.0 then since June 2026, and did not before; this "
        "strategy does not. Set "
        "\"gradient_clipping\" to what you want.");
  const auto& settings = session.settings();
  for (const char* tier : {"/offload/moments/tier", "/offload/parameters/tier"})
    if (settings.count(tier) > 0)
      return session.note("What lies on disks trains on the CPU only. On a GPU Tessera refuses it.");
}

}  // namespace tessera::app
