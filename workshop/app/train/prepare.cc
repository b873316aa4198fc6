#include "workshop/app/train/prepare.h"

#include <ATen/Context.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "engine/job/same_start.h"
#include "engine/loop/token_stream.h"
#include "runtime/base/bytes.h"
#include "runtime/base/mutex.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/transport_rows.h"
#include "tessera/tessera.h"
#include "workshop/app/text/text_sample.h"
#include "workshop/app/train/durable_steps.h"
#include "workshop/app/train/played_order.h"
#include "workshop/app/train/replay.h"
#include "workshop/app/train/training_checkpoints.h"
#include "workshop/models/hf_config.h"

namespace tessera::app {

// This file does what may fail on one rank alone, before ranks communicate.
//
// `prepare` checks the options, reads the model's file, makes the model without memory, and opens tokenizer, data and
// held-out data. It finds the checkpoint to go on from, and rank 0 checks the outputs. `with_global_batch` and
// `with_outputs` write options of the command line into the strategy. All ranks must have the same `description`.

namespace {

absl::Status check_numbers(const TrainCommand& command) {
  const auto refuse = [](const std::string& what) { return make_error(ExitCode::kUsage, "train: " + what); };
  if (command.model.empty() && command.init_from.empty())
    return refuse(
        "--model is required. [T0048] hint: name a model file (docs/models.md), or by --init-from a folder of Hugging "
        "Face");
  if (!command.init_from.empty() && !command.load_weights.path.empty())
    return refuse("--init-from and --load-weights both give the first weights. [T0049] hint: leave one of them out");
  if (command.steps < 1) return refuse("--steps must be 1 or more. [T0050] hint: it is how many updates the run makes");
  if (command.batch < 1)
    return refuse("--batch must be 1 or more. [T0051] hint: it is how many samples a rank takes at a time");
  if (command.data.seq_len < 0)
    return refuse("--seq-len must be 1 or more. [T0052] hint: leave it out for the model's own");
  if (command.status.every < 1)
    return refuse(
        "--log-every must be 1 or more. [T0053] hint: it is how many steps there are from one line to the next");
  if (command.evaluation.data.empty() && (command.evaluation.every > 0 || command.evaluation.batches > 0))
    return refuse(
        "--eval-every and --eval-batches want --eval-data. [T0054] hint: give --eval-data the file to evaluate on");
  if (command.evaluation.data.empty() && command.checkpoints.keep_best)
    return refuse(
        "--keep-best wants --eval-data. [T0055] hint: give it a file to evaluate on; the best checkpoint is that with "
        "the least loss there");
  return absl::OkStatus();
}

absl::Status check_processor(const TrainCommand& command, const Strategy& strategy) {
  if (!command.checkpoints.allows_other_processor || strategy.reproducible) return absl::OkStatus();
  return make_error(ExitCode::kUsage,
                    "train: --allow-other-processor is for a strategy with \"reproducible\": true, and " +
                        command.strategy +
                        " has it not. [T1090] hint: leave the option out, since any processor may go on with this run");
}

/// Workers that come and go are separate jobs, so each worker would write every file. Weights are the exception: one
/// worker writes them.
absl::Status check_elastic(const TrainCommand& command, const Strategy& strategy) {
  if (!strategy.sync.is_elastic()) return absl::OkStatus();
  const bool resumes = command.checkpoints.resume != "auto" && command.checkpoints.resume != "none";
  const std::pair<const char*, bool> options[] = {{"--out", !command.outputs.folder.empty()},
                                                  {"--metrics", !command.outputs.metrics.empty()},
                                                  {"--tensorboard", !command.outputs.tensorboard.empty()},
                                                  {"--trace", !command.outputs.trace.empty()},
                                                  {"--trace-operators", !command.outputs.trace_operators.empty()},
                                                  {"--profile", !command.outputs.profile.empty()},
                                                  {"--checkpoint-dir", !strategy.checkpoint.dir.empty()},
                                                  {"--resume", resumes}};
  for (const auto& [name, is_given] : options)
    if (is_given)
      return make_error(
          ExitCode::kUsage,
          std::string("train: ") + name +
              " does not go with workers that come and go (\"sync\" elastic), since each would do it. "
              "[T1033] hint: leave it out; --save-weights and --export-hf write what all of them have trained");
  return absl::OkStatus();
}

/// Refuses a model that is too large before anything is built. The ranks of a host together hold at least
/// local_world_size / world_size of all parameters under every strategy.
absl::Status check_size(const models::ModelConfig& config, const Strategy& strategy, const Topology& topology) {
  const bool on_gpus = has(strategy.comm.transport, transport_traits::kOnGpu);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  const double wanted = static_cast<double>(models::parameter_count(config)) *
                        static_cast<double>(size_of(strategy.mixed_precision.param)) * topology.local_world_size /
                        topology.world_size;
  if (on_gpus || memory <= 0 || wanted <= memory) return absl::OkStatus();
  return make_error(
      ExitCode::kOsResource,
      "the model has " + std::to_string(models::parameter_count(config)) + " parameters: on " +
          counted(topology.num_hosts(), "host") + " this one holds " + format_bytes(static_cast<std::int64_t>(wanted)) +
          " of them at least, and has " + format_bytes(static_cast<std::int64_t>(memory)) +
          " of memory. [T0056] hint: take a smaller model, or more hosts; tessera plan shows what each strategy needs");
}

absl::StatusOr<std::shared_ptr<models::LanguageModel>> make_deferred(const models::ModelConfig& config,
                                                                     std::uint64_t seed) {
  const models::CheckpointFn recompute = [](const auto& segment, const at::Tensor& x) {
    return checkpoint(segment, x);
  };
  static Mutex default_generator;  // ranks that are threads share it
  const MutexLock lock(default_generator);
  at::manual_seed(seed);
  return deferred_init([&] { return models::make_language_model(config, recompute); });
}

absl::StatusOr<TokenBatches> open_batches(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh,
                                          std::int64_t seq_len, std::int64_t vocab_size,
                                          const std::shared_ptr<const Tokenizer>& tokenizer) {
  DatasetOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.format, parse_token_format(command.data.format));
  options.extensions = command.data.extensions;
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset,
                           open_tokens(command.data.path, options, tokenizer));
  SamplerOptions sampling;
  sampling.batch = command.batch;
  sampling.accumulation = strategy.gradient_accumulation;
  sampling.microbatches = strategy.deal.microbatches;
  sampling.rank = mesh.rank();
  sampling.world_size = mesh.world_size();
  sampling.seed = command.seed;
  sampling.runs = strategy.reproducible && strategy.gradient_sync == GradientSync::kLastMicrobatch;
  sampling.tail = command.pad_tail ? Tail::kPad : Tail::kDrop;
  return TokenStream::batches_of(std::move(dataset), seq_len, vocab_size, sampling);
}

absl::StatusOr<Evaluation> open_evaluation(const TrainCommand& command, const Mesh& mesh, std::int64_t seq_len,
                                           std::int64_t vocab_size, const std::shared_ptr<const Tokenizer>& tokenizer) {
  EvaluationOptions options{command.evaluation.data, command.data.format, command.data.extensions, tokenizer};
  options.batch = command.batch;
  options.most_batches = command.evaluation.batches;
  options.seq_len = seq_len;
  options.vocab_size = vocab_size;
  options.rank = mesh.rank();
  options.world_size = mesh.world_size();
  return Evaluation::open(options);
}

}  // namespace

std::int64_t microbatches_of_step(const Strategy& strategy, int ranks) {
  return strategy.deal.microbatches > 0 ? strategy.deal.microbatches : ranks * strategy.gradient_accumulation;
}

Strategy with_global_batch(Strategy strategy, const TrainCommand& command, int ranks) {
  if (command.global_batch == 0) return strategy;
  const std::int64_t at_once = command.batch * ranks;
  const bool is_dealt = strategy.deal.by == DealBy::kSpeed && command.global_batch % command.batch == 0;
  if (is_dealt && (strategy.deal.microbatches > 0 || command.global_batch % at_once != 0)) {
    const std::int64_t all = command.global_batch / command.batch, wanted = strategy.deal.microbatches;
    if (wanted > 0 && wanted != all)
      throw Error(ExitCode::kConfig, "deal.microbatches is " + std::to_string(wanted) + ", but --global-batch " +
                                         std::to_string(command.global_batch) + " with --batch " +
                                         std::to_string(command.batch) + " makes it " + std::to_string(all) +
                                         ". [T0953] hint: leave deal.microbatches out of the strategy file");
    strategy.deal.microbatches = all;
    throw_if_error(check_strategy(strategy));
    return strategy;
  }
  if (command.global_batch % at_once != 0) {
    throw Error(ExitCode::kConfig, "--global-batch " + std::to_string(command.global_batch) +
                                       " is no multiple of the " + std::to_string(at_once) + " samples that " +
                                       counted(ranks, "rank") + " with --batch " + std::to_string(command.batch) +
                                       " take at once. [T0057] hint: give another --batch, or another number of ranks");
  }
  const std::int64_t microbatches = command.global_batch / at_once, said = strategy.gradient_accumulation;
  if (said != 1 && said != microbatches) {
    throw Error(ExitCode::kConfig, "gradient_accumulation is " + std::to_string(said) + ", but --global-batch " +
                                       std::to_string(command.global_batch) + " on " + counted(ranks, "rank") +
                                       " makes it " + std::to_string(microbatches) +
                                       ". [T0058] hint: leave gradient_accumulation out of the strategy file");
  }
  strategy.gradient_accumulation = microbatches;
  throw_if_error(check_strategy(strategy));
  return strategy;
}

Strategy with_outputs(Strategy strategy, const TrainCommand& command) {
  if (command.replays) return without_outputs(std::move(strategy));
  if (!command.commits.empty()) {
    strategy.durable.dir = command.commits;
    strategy.record_hashes = {};
  }
  const CheckpointOptions& options = command.checkpoints;
  if (strategy.record_hashes.every > 0)
    strategy.record_hashes.file =
        (std::filesystem::path(command.outputs.folder) / strategy.record_hashes.file).string();
  CheckpointConfig& checkpoint = strategy.checkpoint;
  checkpoint.dir = options.folder.value_or(checkpoint.dir);
  checkpoint.every_steps = options.every_steps.value_or(checkpoint.every_steps);
  checkpoint.every_minutes = options.every_minutes.value_or(checkpoint.every_minutes);
  checkpoint.keep = options.keep.value_or(checkpoint.keep);
  return strategy;
}

const std::string& model_of(const TrainCommand& command) {
  return command.model.empty() ? command.init_from : command.model;
}

absl::StatusOr<Prepared> prepare(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh) {
  TESSERA_RETURN_IF_ERROR(check_numbers(command));
  TESSERA_RETURN_IF_ERROR(check_processor(command, strategy));
  TESSERA_RETURN_IF_ERROR(check_elastic(command, strategy));
  Prepared run;
  TESSERA_ASSIGN_OR_RETURN(run.config, models::read_model_config(model_of(command)));
  TESSERA_RETURN_IF_ERROR(check_size(run.config, strategy, mesh.topology()));
  TESSERA_RETURN_IF_ERROR(check_played(run.config, strategy, mesh.topology()));
  TESSERA_ASSIGN_OR_RETURN(run.model, make_deferred(run.config, command.seed));
  run.seq_len = command.data.seq_len > 0 ? command.data.seq_len : run.model->seq_len();
  if (run.seq_len > run.model->seq_len())
    return make_error(ExitCode::kConfig, "--seq-len " + std::to_string(run.seq_len) + " is more than the model's " +
                                             std::to_string(run.model->seq_len()) + ". [T0059] hint: leave it out");
  TESSERA_ASSIGN_OR_RETURN(run.tokenizer, choose_tokenizer(command.data.tokenizer, {command.init_from, command.model}));
  if (run.tokenizer.get()) TESSERA_RETURN_IF_ERROR(check_vocabulary(*run.tokenizer.get(), run.model->vocab_size()));
  if (command.sample.tokens > 0 && !run.tokenizer.get()) TESSERA_RETURN_IF_ERROR(check_byte_level(*run.model));
  TESSERA_ASSIGN_OR_RETURN(run.batches, open_batches(command, strategy, mesh, run.seq_len, run.model->vocab_size(),
                                                     run.tokenizer.tokenizer));
  if (!command.evaluation.data.empty()) {
    TESSERA_ASSIGN_OR_RETURN(
        run.evaluation, open_evaluation(command, mesh, run.seq_len, run.model->vocab_size(), run.tokenizer.tokenizer));
  }
  if (command.commits.empty()) {
    TESSERA_ASSIGN_OR_RETURN(run.resumes, checkpoint_to_resume(command.checkpoints, strategy.checkpoint));
  }
  if (!command.outputs.export_hf.empty()) TESSERA_RETURN_IF_ERROR(models::to_hf_config(run.config, "float32").status());
  const bool goes_on = !run.resumes.empty() || goes_on_durably(strategy, command.checkpoints, mesh.rank());
  run.outputs = outputs_of(command, mesh.topology().restart_count, goes_on);
  if (mesh.rank() != 0) return run;
  RunOutputs checked = run.outputs;
  // A worker may join a run whose steps are all made, and then finds the results of this run. A worker that makes a
  // step checks the outputs again (train.cc).
  if (strategy.sync.is_elastic()) checked.existing = Existing::kReplaced;
  TESSERA_RETURN_IF_ERROR(check_outputs(command, checked));
  if (!strategy.checkpoint.dir.empty() && !command.replays) {
    TESSERA_ASSIGN_OR_RETURN(run.lock, lock_for_run(strategy.checkpoint.dir, "--checkpoint-dir"));
  }
  return run;
}

nlohmann::json description(const TrainCommand& command, const Strategy& strategy, const Prepared& run) {
  return {{"build", this_build()},
          {"strategy", nlohmann::json::parse(strategy.to_json())},
          {"model", nlohmann::json::parse(models::to_json(run.config))},
          {"data", {{"tokens", run.batches->num_tokens()}, {"tokenizer", run.tokenizer.hash}}},
          {"options",
           {{"steps", command.steps},
            {"batch", command.batch},
            {"global-batch", command.global_batch},
            {"seq-len", run.seq_len},
            {"seed", command.seed},
            {"tail", command.pad_tail ? "pad" : "drop"},
            {"sample-tokens", command.sample.tokens},
            {"prompt", command.sample.prompt},
            {"eval-tokens", run.evaluation ? run.evaluation->dataset().num_tokens() : 0},
            {"eval-every", command.evaluation.every},
            {"eval-batches", command.evaluation.batches},
            {"keep-best", command.checkpoints.keep_best},
            {"resume", run.resumes},
            {"init-from", !command.init_from.empty()},
            {"load-weights", !command.load_weights.path.empty()},
            {"export-hf", !run.outputs.hf.empty()},
            {"trace", !run.outputs.trace.empty()},
            {"save-weights", !run.outputs.weights.empty()}}}};
}

}  // namespace tessera::app
