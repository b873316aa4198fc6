#include <ATen/Context.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "engine/loop/token_stream.h"
#include "engine/replay/replay_request.h"
#include "engine/step_profiler.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/placement_rows.h"
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
#include "workshop/app/train/played_order.h"
#include "workshop/app/train/prepare.h"
#include "workshop/app/train/replay.h"
#include "workshop/app/train/run_outputs.h"
#include "workshop/app/train/train_report.h"
#include "workshop/app/train/training_checkpoints.h"
#include "workshop/models/language_model.h"
#include "workshop/models/model_config.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kTracedSteps = 3;
// This file runs `tessera train` on one rank.
//
// `run_train` reads the strategy and joins the ranks. `train_on` prepares everything that may fail on one rank
// (prepare.h: numbers, data, model without memory, outputs, the first checkpoint). All ranks then agree on what was
// prepared (agreement.h). After that, `train_on` makes the Engine, which gives parameters memory. `train` is the loop:
// `train_step` runs microbatches until they complete a step. Then a report, an evaluation, a checkpoint and a commit
// follow, if they are due. Weights, exports, traces and a sample are written at the end. The result of a GPU's step is
// known one step late (`unknown`). A process without a launcher plays an order of several ranks as threads.

constexpr std::int64_t kMostTokensToCount = std::int64_t{1} << 30;

void print_start(const TrainCommand& command, const Prepared& run, const Engine& engine, const Mesh& mesh,
                 int threads) {
  const Strategy& strategy = engine.strategy();
  const TokenBatches& batches = *run.batches;
  const std::string param(name_of(strategy.mixed_precision.param)), reduce(name_of(strategy.mixed_precision.reduce));
  const std::string global = std::to_string(command.batch * microbatches_of_step(strategy, mesh.world_size()));
  std::string text = "model   " + model_of(command) + ": " + std::to_string(models::parameter_count(run.config)) +
                     " parameters in " + counted(engine.unit_names().size(), "unit") + ", " +
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

/// Returns the entropy of the tokens. Rank 0 alone reads all of the data for it. Returns nothing if there is so much
/// data that the other ranks would wait too long.
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

/// A step's result, with the epoch and the traffic counts after the step.
struct FinishedStep {
  StepResult result;
  std::int64_t epoch = 0;
  TrafficCounts traffic;
};

/// Brings `count` batches to the Engine's device. Each batch is brought while the batch before it trains. If
/// microbatches are dealt, a step's first batch waits until the rank's microbatches are known. If workers come and go,
/// this first batch waits until the rank's step is known. If ranks also compute microbatches of other ranks, a batch is
/// brought as soon as it is known which microbatch comes next.
class BatchesAhead {
 public:
  BatchesAhead(TokenBatches& batches, Engine& engine, std::int64_t count)
      : batches_(batches),
        engine_(engine),
        deals_(engine.strategy().deal.by == DealBy::kSpeed),
        backs_up_(engine.strategy().deal.backups > 0),
        left_(deals_ || engine.strategy().sync.is_elastic() ? 0 : count),
        cursor_(batches.cursor()) {
    start();
  }

  /// The loop calls this function before a step's first batch if workers come and go. `step` is the number of that
  /// step.
  void go_to_step(std::int64_t step) {
    batches_.go_to_step(step);
    left_ = engine_.strategy().gradient_accumulation;
    start();
  }
  std::int64_t data_order() const { return batches_.data_order(); }
  /// The loop calls this function before a step's first batch.
  void begin_step() {
    if (!deals_ || backs_up_) return;
    const MicrobatchRun run = engine_.microbatches();
    batches_.deal(run);
    left_ = run.end - run.begin;
    start();
  }
  /// The loop calls this function after a step's last batch.
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
  /// Skips `count` batches.
  void skip(std::int64_t count) {
    for (; count > 0; --count) next();
  }
  /// Returns the epoch of the batch that `next` gave last.
  std::int64_t epoch() const { return epoch_; }
  /// Returns the cursor after the batch that `next` gave last.
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

/// Seconds of a step. A value is 0 if there are no measurements from which it follows.
struct StepSeconds {
  double predicted = 0;
  double alone = 0;  ///< seconds in which a single rank makes as many microbatches as a rank here on average
};

/// Returns the seconds that follow from the files of --predict-links and --predict-profile.
StepSeconds seconds_by(const TrainCommand& command, const Prepared& run, const Engine& engine, const Mesh& mesh) {
  if (command.predicted_by.links.empty()) return {};
  if (!mesh.topology().has_equal_hosts())
    throw Error(ExitCode::kUsage,
                "train: the time of a step is predicted for hosts with the same number of ranks, and here they differ. "
                "[T0989] hint: leave --predict-links out");
  const MemoryPlan plan = ModelShapes(run.config).plan(engine.strategy(), mesh.topology());
  const TimingFiles files = read_timing(command.predicted_by);
  const double microbatches =
      static_cast<double>(microbatches_of_step(engine.strategy(), mesh.world_size())) / mesh.world_size();
  return {predicted_step(plan, files, mesh.topology().local_world_size).seconds,
          files.profile.step_seconds(microbatches)};
}

/// Returns the metrics file's header, except the run id and the time.
std::vector<Metric> about(const TrainCommand& command, const Prepared& run, const Engine& engine, const Mesh& mesh,
                          double predicted_s) {
  std::vector<Metric> metrics = {{"tessera", TESSERA_VERSION},
                                 {"steps", command.steps},
                                 {"ranks", std::int64_t{mesh.world_size()}},
                                 {"strategy", name_of_placement(engine.strategy())},
                                 {"model", model_of(command)},
                                 {"parameters", models::parameter_count(run.config)},
                                 {"data", command.data.path},
                                 {"seed", static_cast<std::int64_t>(command.seed)},
                                 {"restart", std::int64_t{mesh.topology().restart_count}}};
  if (predicted_s > 0) metrics.push_back({"predicted_seconds", predicted_s});
  if (engine.peak_tflops() > 0) metrics.push_back({"peak_tflops", engine.peak_tflops()});
  return metrics;
}

/// Returns whether an evaluation is due: every --eval-every steps, and at the end. `before` is the number of steps that
/// were done before the last result.
bool evaluation_is_due(const TrainCommand& command, const Prepared& run, std::int64_t before, std::int64_t steps_done) {
  return run.evaluation && (passes(before, steps_done, command.evaluation.every) || steps_done == command.steps);
}

/// Writes a trace. If it cannot be written, there is only a warning, since the training is done.
void try_to_write_trace(const std::string& path, const Mesh& mesh) {
  try {
    write_trace(path, mesh);
  } catch (const Error& error) {
    if (error.exit_code() != ExitCode::kCannotCreate) throw;
    if (mesh.rank() == 0) log_warning(error.message());
  }
}

/// Sets the number of samples of an epoch, if the learning rate rises over epochs and the strategy does not give the
/// number.
void set_epoch_samples(const TrainCommand& command, const Mesh& mesh, const TokenBatches& batches, Engine& engine) {
  const Strategy& strategy = engine.strategy();
  if (strategy.lr_schedule.warmup_epochs == 0 || strategy.lr_schedule.epoch_samples > 0) return;
  const std::int64_t of_step = command.batch * microbatches_of_step(strategy, mesh.world_size());
  engine.set_epoch_samples(batches.steps_per_epoch() * of_step - batches.padded_samples());
}

/// Saves the commit of step `done`, from which the ranks have gone on, as a checkpoint. Returns the exit code.
int save_commit(const TrainCommand& command, TrainingCheckpoints& checkpoints, std::int64_t done,
                const SamplerCursor& data) {
  if (done == 0)
    throw Error(
        ExitCode::kNoInput,
        command.commits +
            " holds no commit that all ranks have. [T1091] hint: name the \"dir\" of the strategy's \"durable\", "
            "with the files of all ranks");
  checkpoints.after_step({.before = done, .step = done, .steps = done}, data, std::nullopt);
  return static_cast<int>(ExitCode::kOk);
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
  if (!command.commits.empty()) return save_commit(command, checkpoints, done, run.batches->cursor());
  engine.time_data();
  if (command.status.histogram_every > 0) engine.time_calls();
  if (command.status.peak_tflops > 0) engine.set_peak_tflops(command.status.peak_tflops);
  const StepSeconds seconds = speaks ? seconds_by(command, run, engine, mesh) : StepSeconds{};
  TrainReport report({command.steps, command.status.every, run.batches->steps_per_epoch(), run.outputs,
                      run.evaluation.has_value(), seconds.predicted, seconds.alone, mesh.world_size(),
                      command.status.show});
  std::optional<double> entropy;
  const bool elastic = engine.strategy().sync.is_elastic();
  if (speaks) {
    throw_if_error(write_config(run.outputs, command, engine.strategy(), run.config, mesh.topology()));
    throw_if_error(report.open(about(command, run, engine, mesh, seconds.predicted)));
    print_start(command, run, engine, mesh, threads);
    if (!command.replays && !elastic) entropy = entropy_of(TokenStream::of(*run.batches).dataset());
  }
  const auto report_step = [&](FinishedStep& step) {
    step.result.wait();
    if (speaks) report.add(step.result, step.epoch, step.traffic);
  };
  BatchesAhead batches(*run.batches, engine,
                       std::max<std::int64_t>(0, command.steps - done) * engine.strategy().gradient_accumulation);
  std::optional<FinishedStep> unknown;  // a GPU's step; its result is read when the next step is under way
  const std::string trace = run.outputs.trace;
  OperatorTrace operators;
  const bool traces_operators = speaks && !run.outputs.operators.empty();
  std::optional<StepProfiler> profiler;
  if (!run.outputs.profile.empty()) profiler.emplace(engine);
  const auto report_latencies = [&](std::int64_t after_step) {
    if (!speaks || command.status.histogram_every == 0) return;
    report.add(engine.latencies(), after_step);
    report.add(engine.staleness(), after_step);
  };
  bool is_traced = false, makes_steps = false;
  for (std::int64_t step = done; elastic || step < command.steps;) {  // `step` counts the steps that are done
    if (elastic) {
      const std::optional<std::int64_t> taken = engine.take_step(command.steps, batches.data_order());
      if (!taken) break;
      // This run has no results while it has steps to make, so files that are there belong to another run.
      if (speaks && !std::exchange(makes_steps, true)) throw_if_error(check_outputs(command, run.outputs));
      step = *taken;
      batches.go_to_step(step);
    }
    const bool traces = !is_traced && step >= command.steps - kTracedSteps;
    is_traced = is_traced || traces;
    if (traces && !trace.empty()) Trace::start();
    if (traces && traces_operators) operators.start();
    FinishedStep now{train_step(engine, *run.model, batches), batches.epoch(), engine.traffic()};
    if (profiler) profiler->end_step(/*counts=*/step > done);
    // A rank that was late has skipped steps ("sync" backups). It skips the data of those steps too.
    const std::int64_t before = std::exchange(step, step + std::max<std::int64_t>(1, now.result.missed));
    batches.skip((step - before - 1) * engine.strategy().gradient_accumulation);
    if (elastic) now.result.step = step;
    if (unknown) report_step(*unknown);
    unknown.reset();
    const bool evaluates = evaluation_is_due(command, run, before, step);
    now.result.is_known() || evaluates ? report_step(now) : void(unknown = std::move(now));
    if (passes(before, step, command.status.histogram_every) && step < command.steps) report_latencies(step);
    std::optional<double> held_out;
    if (evaluates) {
      const EvaluationResult result = run.evaluation->run(*run.model, engine);
      held_out = result.loss;
      if (speaks) report.add(result, step, engine.traffic());
    }
    const bool ends = checkpoints.after_step({before, step, command.steps}, batches.cursor(), held_out);
    commit_durable_step(engine, checkpoints.items(batches.cursor()), ends || step == command.steps);
    // There was a signal. The run that continues later writes the outputs at the end of training.
    if (ends) {
      report_latencies(step);
      return command.checkpoints.signal_exit_code;
    }
  }
  if (unknown) report_step(*unknown);
  report_latencies(command.steps);
  if (elastic && !engine.writes_results()) {
    log_info("all steps are made, and another worker writes the results");
    return exit_code_after(absl::OkStatus());
  }
  // A worker that was killed may have written the same results before.
  const Existing existing = elastic ? Existing::kReplaced : run.outputs.existing;
  // The weights, which took longest to make, are saved first.
  if (!run.outputs.weights.empty()) save_weights(engine, run.outputs.weights, existing);
  if (!run.outputs.hf.empty()) {
    export_hf(engine, mesh, run.outputs.hf, run.config, existing);
    if (speaks) throw_if_error(copy_tokenizer(run.tokenizer, run.outputs.hf, existing));
  }
  if (profiler) throw_if_error(write_output(run.outputs.profile, to_json(profiler->profile()), existing, "--profile"));
  const absl::Status reported = speaks ? report.finish(entropy) : absl::OkStatus();
  if (!trace.empty()) try_to_write_trace(trace, mesh);
  if (operators.is_on()) operators.try_to_write(run.outputs.operators);
  if (elastic) engine.note_results_written();
  if (command.sample.tokens > 0) print_sample(*run.model, run, command.sample, engine.device(), speaks);
  return exit_code_after(reported);
}

int train_on(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh) {
  absl::StatusOr<Prepared> run = prepare(command, strategy, mesh);
  absl::StatusOr<nlohmann::json> mine =
      run.ok() ? description(command, strategy, *run) : absl::StatusOr<nlohmann::json>(run.status());
  throw_if_error(agree(mine, {mesh.rank(), mesh.world_size(), strategy.comm.init_timeout_s}, groups_of(mesh).store()));
  const TrainCommand own = with_own_steps(command, strategy, mesh.rank());
  const int threads = set_threads_of_rank(mesh.topology().local_world_size);
  Engine engine(run->model, strategy, mesh);
  // Weights are the same on all ranks. Random numbers that are drawn while training (dropout) must differ between
  // ranks. If "reproducible" is set, the Engine sets the generator for each microbatch.
  if (!strategy.reproducible) at::manual_seed(seed_for_rank(command.seed, mesh.rank()));
  return train(own, mesh, *run, engine, threads);
}

}  // namespace

int run_train(const TrainCommand& command) {
  int code = 0;
  if (command.status.plan) ::setenv("TESSERA_PLAN", "table", /*overwrite=*/1);
  if (command.checkpoints.allows_other_processor) ::setenv("TESSERA_ALLOW_OTHER_PROCESSOR", "1", /*overwrite=*/1);
  const int failed = run([&] {
    const Strategy strategy = with_outputs(Strategy::from_file(command.strategy), command);
    const Mesh of_process = init(strategy);
    code = on_ranks_of_this_process(strategy, of_process, [&](const Mesh& mesh) {
      const Strategy complete = with_global_batch(strategy, command, mesh.world_size());
      return train_on(command, as_replayed(complete, mesh.world_size()), mesh);
    });
  });
  return failed != 0 ? failed : code;
}

}  // namespace tessera::app
