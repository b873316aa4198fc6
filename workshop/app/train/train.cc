#include <ATen/Context.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "checkpoint/checkpoint_folder.h"
#include "engine/job/same_start.h"
#include "engine/loop/token_stream.h"
#include "engine/replay/replay_request.h"
#include "engine/step_profiler.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_file.h"
#include "runtime/data/dataset_stats.h"
#include "tessera/tessera.h"
#include "tessera/token_batches.h"
#include "workshop/app/commands.h"
#include "workshop/app/exit_code_after.h"
#include "workshop/app/hugging_face.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/app/text/text_sample.h"
#include "workshop/app/text/text_tokenizer.h"
#include "workshop/app/threads.h"
#include "workshop/app/train/agreement.h"
#include "workshop/app/train/durable_steps.h"
#include "workshop/app/train/evaluation.h"
#include "workshop/app/train/operator_trace.h"
#include "workshop/app/train/replay.h"
#include "workshop/app/train/run_outputs.h"
#include "workshop/app/train/train_report.h"
#include "workshop/app/train/training_checkpoints.h"
#include "workshop/models/hf_config.h"
#include "workshop/models/language_model.h"
#include "workshop/models/model_config.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kTracedSteps = 3;
// `tessera train`, on one rank.
//
// `run_train` reads the strategy and joins the ranks. `train_on` prepares everything that may fail by itself
// (`prepare`: numbers, data, model without memory, outputs, the checkpoint to begin with), lets all ranks agree on it
// (agreement.h), and only then makes the Engine, which gives parameters memory. `train` is the loop: `train_step` runs
// microbatches until the step is due; a report, an evaluation, a checkpoint and a commit follow where they are due; at
// the end weights, exports, traces and a sample are written. The result of a GPU's step is known one step
// late (`unknown`).

constexpr std::int64_t kMostTokensToCount = std::int64_t{1} << 30;

/// Everything that a run consists of, before any parameter has memory.
struct Prepared {
  models::ModelConfig config;
  std::shared_ptr<models::LanguageModel> model;  ///< deferred
  std::optional<TokenBatches> batches;
  std::optional<Evaluation> evaluation;
  ChosenTokenizer tokenizer;  ///< this is set if the data is text
  RunOutputs outputs;
  std::string resumes;  ///< path of a checkpoint; empty: none
  FolderLock lock;      ///< rank 0's lock on the folder for checkpoints
  std::int64_t seq_len = 0;
};

std::string counted(std::int64_t count, const std::string& word) {
  return std::to_string(count) + " " + word + (count == 1 ? "" : "s");
}

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
  if (command.seq_len < 0) return refuse("--seq-len must be 1 or more. [T0052] hint: leave it out for the model's own");
  if (command.log_every < 1)
    return refuse(
        "--log-every must be 1 or more. [T0053] hint: it is how many steps there are from one line to the next");
  if (command.eval_data.empty() && (command.eval_every > 0 || command.eval_batches > 0))
    return refuse(
        "--eval-every and --eval-batches want --eval-data. [T0054] hint: give --eval-data the file to evaluate on");
  if (command.eval_data.empty() && command.checkpoints.keep_best)
    return refuse(
        "--keep-best wants --eval-data. [T0055] hint: give it a file to evaluate on; the best checkpoint is that with "
        "the least loss there");
  return absl::OkStatus();
}

/// Refuses a model that is too large before anything is built: the ranks of a host hold at least this share of all
/// parameters between them, whatever the strategy.
absl::Status check_size(const models::ModelConfig& config, const Strategy& strategy, const Topology& topology) {
  const bool on_gpus =
      strategy.comm.transport == TransportChoice::kNccl || strategy.comm.transport == TransportChoice::kCudaHost;
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  const double wanted = static_cast<double>(models::parameter_count(config)) *
                        static_cast<double>(size_of(strategy.mixed_precision.param)) / topology.num_hosts();
  if (on_gpus || memory <= 0 || wanted <= memory) return absl::OkStatus();
  return make_error(
      ExitCode::kOsResource,
      "the model has " + std::to_string(models::parameter_count(config)) + " parameters: on " +
          counted(topology.num_hosts(), "host") + " each holds " + format_bytes(static_cast<std::int64_t>(wanted)) +
          " of them at least, and this one has " + format_bytes(static_cast<std::int64_t>(memory)) +
          " of memory. [T0056] hint: take a smaller model, or more hosts; tessera plan shows what each strategy needs");
}

absl::StatusOr<std::shared_ptr<models::LanguageModel>> make_deferred(const models::ModelConfig& config,
                                                                     std::uint64_t seed) {
  const models::CheckpointFn recompute = [](const auto& segment, const at::Tensor& x) {
    return checkpoint(segment, x);
  };
  at::manual_seed(seed);
  return deferred_init([&] { return models::make_language_model(config, recompute); });
}

/// Returns the microbatches of a step on all ranks.
std::int64_t microbatches_of_step(const Strategy& strategy, int ranks) {
  return strategy.deal.microbatches > 0 ? strategy.deal.microbatches : ranks * strategy.gradient_accumulation;
}

/// Sets the number of microbatches of a step that --global-batch needs on `ranks` ranks.
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
                                         ". hint: leave deal.microbatches out of the strategy file");
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

/// Puts in the run directory, and the options for checkpoints, which win over the strategy file. A replay writes none
/// of these outputs.
Strategy with_outputs(Strategy strategy, const TrainCommand& command) {
  if (command.replays) return without_outputs(std::move(strategy));
  const CheckpointOptions& options = command.checkpoints;
  if (strategy.record_hashes.every > 0)
    strategy.record_hashes.file = (std::filesystem::path(command.out) / strategy.record_hashes.file).string();
  CheckpointConfig& checkpoint = strategy.checkpoint;
  checkpoint.dir = options.folder.value_or(checkpoint.dir);
  checkpoint.every_steps = options.every_steps.value_or(checkpoint.every_steps);
  checkpoint.every_minutes = options.every_minutes.value_or(checkpoint.every_minutes);
  checkpoint.keep = options.keep.value_or(checkpoint.keep);
  return strategy;
}

absl::StatusOr<TokenBatches> open_batches(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh,
                                          std::int64_t seq_len, std::int64_t vocab_size,
                                          const std::shared_ptr<const Tokenizer>& tokenizer) {
  DatasetOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.format, parse_token_format(command.data_format));
  options.extensions = command.extensions;
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset, open_tokens(command.data, options, tokenizer));
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
  EvaluationOptions options{command.eval_data, command.data_format, command.extensions, tokenizer};
  options.batch = command.batch;
  options.most_batches = command.eval_batches;
  options.seq_len = seq_len;
  options.vocab_size = vocab_size;
  options.rank = mesh.rank();
  options.world_size = mesh.world_size();
  return Evaluation::open(options);
}

/// Returns the path from which the model is read.
const std::string& model_of(const TrainCommand& command) {
  return command.model.empty() ? command.init_from : command.model;
}

absl::StatusOr<Prepared> prepare(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh) {
  TESSERA_RETURN_IF_ERROR(check_numbers(command));
  Prepared run;
  TESSERA_ASSIGN_OR_RETURN(run.config, models::read_model_config(model_of(command)));
  TESSERA_RETURN_IF_ERROR(check_size(run.config, strategy, mesh.topology()));
  TESSERA_ASSIGN_OR_RETURN(run.model, make_deferred(run.config, command.seed));
  run.seq_len = command.seq_len > 0 ? command.seq_len : run.model->seq_len();
  if (run.seq_len > run.model->seq_len())
    return make_error(ExitCode::kConfig, "--seq-len " + std::to_string(run.seq_len) + " is more than the model's " +
                                             std::to_string(run.model->seq_len()) + ". [T0059] hint: leave it out");
  TESSERA_ASSIGN_OR_RETURN(run.tokenizer, choose_tokenizer(command.tokenizer, {command.init_from, command.model}));
  if (run.tokenizer.get()) TESSERA_RETURN_IF_ERROR(check_vocabulary(*run.tokenizer.get(), run.model->vocab_size()));
  if (command.sample.tokens > 0 && !run.tokenizer.get()) TESSERA_RETURN_IF_ERROR(check_byte_level(*run.model));
  TESSERA_ASSIGN_OR_RETURN(run.batches, open_batches(command, strategy, mesh, run.seq_len, run.model->vocab_size(),
                                                     run.tokenizer.tokenizer));
  if (!command.eval_data.empty()) {
    TESSERA_ASSIGN_OR_RETURN(
        run.evaluation, open_evaluation(command, mesh, run.seq_len, run.model->vocab_size(), run.tokenizer.tokenizer));
  }
  TESSERA_ASSIGN_OR_RETURN(run.resumes, checkpoint_to_resume(command.checkpoints, strategy.checkpoint));
  if (!command.export_hf.empty()) TESSERA_RETURN_IF_ERROR(models::to_hf_config(run.config, "float32").status());
  const bool goes_on = !run.resumes.empty() || goes_on_durably(strategy, command.checkpoints, mesh.rank());
  run.outputs = outputs_of(command, mesh.topology().restart_count, goes_on);
  if (mesh.rank() != 0) return run;
  TESSERA_RETURN_IF_ERROR(check_outputs(command, run.outputs));
  if (!strategy.checkpoint.dir.empty() && !command.replays) {
    TESSERA_ASSIGN_OR_RETURN(run.lock, lock_for_run(strategy.checkpoint.dir, "--checkpoint-dir"));
  }
  return run;
}

/// Returns all that must be the same on every rank.
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
            {"eval-every", command.eval_every},
            {"eval-batches", command.eval_batches},
            {"keep-best", command.checkpoints.keep_best},
            {"resume", run.resumes},
            {"init-from", !command.init_from.empty()},
            {"load-weights", !command.load_weights.path.empty()},
            {"export-hf", !run.outputs.hf.empty()},
            {"trace", !run.outputs.trace.empty()},
            {"save-weights", !run.outputs.weights.empty()}}}};
}

void print_start(const TrainCommand& command, const Prepared& run, const Engine& engine, const Mesh& mesh,
                 int threads) {
  const Strategy& strategy = engine.strategy();
  const TokenBatches& batches = *run.batches;
  const std::string param(name_of(strategy.mixed_precision.param)), reduce(name_of(strategy.mixed_precision.reduce));
  const std::string global = std::to_string(command.batch * microbatches_of_step(strategy, mesh.world_size()));
  std::string text = "model   " + model_of(command) + ": " + std::to_string(models::parameter_count(run.config)) +
                     " parameters in " + counted(static_cast<std::int64_t>(engine.unit_names().size()), "unit") + ", " +
                     name_of_placement(strategy) + " over " + counted(mesh.world_size(), "rank") + " of " +
                     counted(threads, "thread") + "\n";
  text += "dtypes  parameters " + param + ", gradients on the wire " + reduce + ", master weights fp32, " +
          name_of(strategy.optimizer.type) + " state " + name_of(strategy.optimizer.state_dtype) + "\n";
  text += "data    " + TokenStream::of(batches).dataset().describe() + "\n";
  text += "step    " + global + " samples of " + std::to_string(run.seq_len) + " tokens; " +
          std::to_string(batches.steps_per_epoch()) + " steps an epoch, " +
          (command.pad_tail ? std::to_string(batches.padded_samples()) + " places of the last one are empty"
                            : std::to_string(batches.dropped_samples()) + " samples left out") +
          "\n";
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

/// Reads the whole data once, on rank 0 alone. It is left out if the other ranks would wait too long.
std::optional<double> entropy_of(const TokenDataset& dataset) {
  if (dataset.num_tokens() > kMostTokensToCount) return std::nullopt;
  const double entropy = value_or_throw(unigram_entropy(dataset));
  std::printf("unigram entropy %.4f nats a token: the loss of a model that knows only how often each token occurs\n",
              entropy);
  std::fflush(stdout);
  return entropy;
}

at::Tensor forward(models::LanguageModel& model, const TokenBatch& batch) {
  const Span span("forward");
  return model.forward(batch.input, batch.target);
}

/// A step's result, with the epoch and the traffic after it.
struct FinishedStep {
  StepResult result;
  std::int64_t epoch = 0;
  TrafficCounts traffic;
};

/// Brings `count` batches to the Engine's device, each while the one before it trains. Where microbatches are dealt, a
/// step's first batch waits until the rank's microbatches are known. Where ranks make each other's, a batch is brought
/// when it is known which comes next.
class BatchesAhead {
 public:
  BatchesAhead(TokenBatches& batches, Engine& engine, std::int64_t count)
      : batches_(batches),
        engine_(engine),
        deals_(engine.strategy().deal.by == DealBy::kSpeed),
        backs_up_(engine.strategy().deal.backups > 0),
        left_(deals_ ? 0 : count),
        cursor_(batches.cursor()) {
    start();
  }

  /// This is called before a step's first batch.
  void begin_step() {
    if (!deals_ || backs_up_) return;
    const MicrobatchRun run = engine_.microbatches();
    batches_.deal(run);
    left_ = run.end - run.begin;
    start();
  }
  /// This is called behind a step's last batch.
  void end_step() {
    if (!backs_up_) return;
    batches_.end_step();
    cursor_ = batches_.cursor();
  }
  TokenBatch next() {
    if (backs_up_) {
      const TokenBatch batch = batches_.of(engine_.microbatch(), engine_.device());
      epoch_ = batches_.epoch();
      return batch;
    }
    Ahead now = *std::exchange(ahead_, std::nullopt);
    start();
    epoch_ = now.epoch;
    cursor_ = now.cursor;
    return {now.upload.tensors()[0], now.upload.tensors()[1], now.weight};
  }
  /// Leaves out `count` batches.
  void skip(std::int64_t count) {
    for (; count > 0; --count) next();
  }
  /// Returns the epoch of the latest `next`.
  std::int64_t epoch() const { return epoch_; }
  /// Returns the cursor behind the latest `next`.
  const SamplerCursor& cursor() const { return cursor_; }

 private:
  struct Ahead {
    Upload upload;
    double weight;
    std::int64_t epoch;
    SamplerCursor cursor;
  };
  void start() {
    if (left_-- <= 0) return;
    const TokenBatch batch = batches_.next();
    ahead_ = Ahead{engine_.upload({batch.input, batch.target}), batch.weight, batches_.epoch(), batches_.cursor()};
  }

  TokenBatches& batches_;
  Engine& engine_;
  const bool deals_, backs_up_;
  std::int64_t left_, epoch_ = 0;
  SamplerCursor cursor_;
  std::optional<Ahead> ahead_;
};

StepResult train_step(Engine& engine, models::LanguageModel& model, BatchesAhead& batches) {
  batches.begin_step();
  while (!engine.step_is_due()) {
    const TokenBatch batch = batches.next();
    const at::Tensor loss = forward(model, batch);
    const std::int64_t rows = batch.weight > 0 ? batch.input.size(0) : 0;
    engine.backward(loss, {.tokens = rows * batch.input.size(1), .samples = rows, .weight = batch.weight});
  }
  StepResult result = engine.step();
  batches.end_step();
  return result;
}

void print_sample(models::LanguageModel& model, const Prepared& run, const TextSampling& sampling, at::Device device,
                  bool print) {
  const std::string text = continue_text(model, sampling, run.tokenizer.get(), device);
  if (print) std::printf("--- sample\n%s\n---\n", text.c_str());
}

/// Returns the seconds that a step is predicted to take; 0 if there are no measurements for a prediction.
double predicted_seconds(const TrainCommand& command, const Prepared& run, const Engine& engine, const Mesh& mesh) {
  if (command.predicted_by.links.empty()) return 0;
  const MemoryPlan plan = ModelShapes(run.config).plan(engine.strategy(), mesh.topology());
  return predicted_step(plan, read_timing(command.predicted_by), mesh.topology().local_world_size).seconds;
}

/// Returns the metrics file's header, besides run id and time.
std::vector<Metric> about(const TrainCommand& command, const Prepared& run, const Engine& engine, const Mesh& mesh,
                          double predicted_s) {
  std::vector<Metric> metrics = {{"tessera", TESSERA_VERSION},
                                 {"steps", command.steps},
                                 {"ranks", std::int64_t{mesh.world_size()}},
                                 {"strategy", name_of_placement(engine.strategy())},
                                 {"model", model_of(command)},
                                 {"parameters", models::parameter_count(run.config)},
                                 {"data", command.data},
                                 {"seed", static_cast<std::int64_t>(command.seed)},
                                 {"restart", std::int64_t{mesh.topology().restart_count}}};
  if (predicted_s > 0) metrics.push_back({"predicted_seconds", predicted_s});
  if (engine.peak_tflops() > 0) metrics.push_back({"peak_tflops", engine.peak_tflops()});
  return metrics;
}

/// Returns whether an evaluation is due: every --eval-every steps, and at the end. `before`: steps one result earlier.
bool evaluation_is_due(const TrainCommand& command, const Prepared& run, std::int64_t before, std::int64_t steps_done) {
  return run.evaluation && (passes(before, steps_done, command.eval_every) || steps_done == command.steps);
}

/// Writes a trace. If it cannot be written there is only a warning, since the training is done.
void try_to_write_trace(const std::string& path, const Mesh& mesh) {
  try {
    write_trace(path, mesh);
  } catch (const Error& error) {
    if (error.exit_code() != ExitCode::kCannotCreate) throw;
    if (mesh.rank() == 0) log_warning(error.message());
  }
}

/// Says how many samples an epoch has, where the rate rises over epochs and the strategy does not say it.
void set_epoch_samples(const TrainCommand& command, const Mesh& mesh, const TokenBatches& batches, Engine& engine) {
  const Strategy& strategy = engine.strategy();
  if (strategy.lr_schedule.warmup_epochs == 0 || strategy.lr_schedule.epoch_samples > 0) return;
  const std::int64_t of_step = command.batch * microbatches_of_step(strategy, mesh.world_size());
  engine.set_epoch_samples(batches.steps_per_epoch() * of_step - batches.padded_samples());
}

/// Returns the exit code.
int train(const TrainCommand& command, const Mesh& mesh, Prepared& run, Engine& engine, int threads) {
  TrainingCheckpoints checkpoints(engine, command.checkpoints, run.config, mesh);
  if (run.resumes.empty() && !command.init_from.empty()) import_hf(engine, command.init_from, run.config);
  if (run.resumes.empty() && !command.load_weights.path.empty())
    load_weights(engine, command.load_weights.path,
                 {.part = command.load_weights.part, .without = command.load_weights.without});
  const bool speaks = mesh.rank() == 0;
  const std::int64_t done = checkpoints.resume(
      run.resumes, resume_durable_steps(command.checkpoints, engine, *run.batches, speaks), *run.batches);
  set_epoch_samples(command, mesh, *run.batches, engine);
  engine.time_data();
  if (command.histogram_every > 0) engine.time_calls();
  if (command.peak_tflops > 0) engine.set_peak_tflops(command.peak_tflops);
  const double predicted_s = speaks ? predicted_seconds(command, run, engine, mesh) : 0;
  TrainReport report({command.steps, command.log_every, run.batches->steps_per_epoch(), run.outputs,
                      run.evaluation.has_value(), predicted_s, mesh.world_size(), command.show});
  std::optional<double> entropy;
  if (speaks) {
    throw_if_error(write_config(run.outputs, command, engine.strategy(), run.config, mesh.topology()));
    throw_if_error(report.open(about(command, run, engine, mesh, predicted_s)));
    print_start(command, run, engine, mesh, threads);
    if (!command.replays) entropy = entropy_of(TokenStream::of(*run.batches).dataset());
  }
  const auto report_step = [&](FinishedStep& step) {
    step.result.wait();
    if (speaks) report.add(step.result, step.epoch, step.traffic);
  };
  BatchesAhead batches(*run.batches, engine,
                       std::max<std::int64_t>(0, command.steps - done) * engine.strategy().gradient_accumulation);
  std::optional<FinishedStep> unknown;  // a GPU's step; its result is read when the next one is under way
  const std::string trace = run.outputs.trace;
  OperatorTrace operators;
  const bool traces_operators = speaks && !run.outputs.operators.empty();
  std::optional<StepProfiler> profiler;
  if (!run.outputs.profile.empty()) profiler.emplace(engine);
  const auto report_latencies = [&](std::int64_t after_step) {
    if (!speaks || command.histogram_every == 0) return;
    report.add(engine.latencies(), after_step);
    report.add(engine.staleness(), after_step);
  };
  bool is_traced = false;
  for (std::int64_t step = done; step < command.steps;) {  // `step` counts the steps that are done
    const bool traces = !is_traced && step >= command.steps - kTracedSteps;
    is_traced = is_traced || traces;
    if (traces && !trace.empty()) Trace::start();
    if (traces && traces_operators) operators.start();
    FinishedStep now{train_step(engine, *run.model, batches), batches.epoch(), engine.traffic()};
    if (profiler) profiler->end_step(/*counts=*/step > done);
    // A rank that was late has skipped steps ("sync" backups), and skips their data.
    const std::int64_t before = std::exchange(step, step + std::max<std::int64_t>(1, now.result.missed));
    batches.skip((step - before - 1) * engine.strategy().gradient_accumulation);
    if (unknown) report_step(*unknown);
    unknown.reset();
    const bool evaluates = evaluation_is_due(command, run, before, step);
    now.result.is_known() || evaluates ? report_step(now) : void(unknown = std::move(now));
    if (passes(before, step, command.histogram_every) && step < command.steps) report_latencies(step);
    std::optional<double> held_out;
    if (evaluates) {
      const EvaluationResult result = run.evaluation->run(*run.model, engine);
      held_out = result.loss;
      if (speaks) report.add(result, step, engine.traffic());
    }
    const bool ends = checkpoints.after_step({before, step, command.steps}, batches.cursor(), held_out);
    commit_durable_step(engine, checkpoints.items(batches.cursor()), ends || step == command.steps);
    // A signal came, so the outputs of the end of training are left to the run that goes on.
    if (ends) {
      report_latencies(step);
      return command.checkpoints.signal_exit_code;
    }
  }
  if (unknown) report_step(*unknown);
  report_latencies(command.steps);
  // The weights, which took longest to make, are saved first.
  if (!run.outputs.weights.empty()) save_weights(engine, run.outputs.weights, run.outputs.existing);
  if (!run.outputs.hf.empty()) {
    export_hf(engine, mesh, run.outputs.hf, run.config, run.outputs.existing);
    if (speaks) throw_if_error(copy_tokenizer(run.tokenizer, run.outputs.hf, run.outputs.existing));
  }
  if (profiler)
    throw_if_error(write_output(run.outputs.profile, to_json(profiler->profile()), run.outputs.existing, "--profile"));
  const absl::Status reported = speaks ? report.finish(entropy) : absl::OkStatus();
  if (!trace.empty()) try_to_write_trace(trace, mesh);
  if (operators.is_on()) operators.try_to_write(run.outputs.operators);
  if (command.sample.tokens > 0) print_sample(*run.model, run, command.sample, engine.device(), speaks);
  return exit_code_after(reported);
}

int train_on(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh) {
  absl::StatusOr<Prepared> run = prepare(command, strategy, mesh);
  absl::StatusOr<nlohmann::json> mine =
      run.ok() ? description(command, strategy, *run) : absl::StatusOr<nlohmann::json>(run.status());
  throw_if_error(agree(mine, {mesh.rank(), mesh.world_size(), strategy.comm.init_timeout_s}, groups_of(mesh).store()));
  const int threads = set_threads_of_rank(mesh.topology().local_world_size);
  Engine engine(run->model, strategy, mesh);
  // Weights are the same on all ranks, but random numbers drawn while training (dropout) are not. Under "reproducible"
  // the Engine sets the generator for each microbatch.
  if (!strategy.reproducible) at::manual_seed(seed_for_rank(command.seed, mesh.rank()));
  return train(command, mesh, *run, engine, threads);
}

}  // namespace

int run_train(const TrainCommand& command) {
  int code = 0;
  if (command.plan) ::setenv("TESSERA_PLAN", "table", /*overwrite=*/1);
  const int failed = run([&] {
    const Strategy strategy = with_outputs(Strategy::from_file(command.strategy), command);
    const Mesh mesh = init(strategy);
    const Strategy complete = with_global_batch(strategy, command, mesh.world_size());
    code = train_on(command, as_replayed(complete, mesh.world_size()), mesh);
  });
  return failed != 0 ? failed : code;
}

}  // namespace tessera::app
