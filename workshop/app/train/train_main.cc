// tessera-train: reads the command lines of the commands that train, plan and read checkpoints, and calls these
// commands.
//
// Each command has a function `add_...`, which declares its options with their bounds and binds them to a struct of
// commands.h. Each group of options that several commands share has its own `add_...`. `run_command_line` then calls
// the command that was given.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/kept_shards.h"
#include "workshop/app/command_line.h"
#include "workshop/app/commands.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kMostSteps = 1'000'000'000'000;
constexpr std::int64_t kMostBatch = 1 << 20;
constexpr std::int64_t kMostTokens = 1 << 27;
constexpr std::int64_t kMostRanks = 1 << 24;  // the most ranks that a plan may have (runtime/comm/launcher_variables.h)
constexpr std::int64_t kMostShards = 65536;

void add_sampling(CLI::App& command, TextSampling& sampling, const std::string& tokens_option) {
  command.add_option("--prompt", sampling.prompt, "text to continue")->capture_default_str();
  command.add_option(tokens_option, sampling.tokens, "tokens to generate; bytes without a tokenizer")
      ->transform(integer_from(0, kMostTokens));
  command.add_option("--temperature", sampling.temperature, "0: always the likeliest token")
      ->check(number_from(0, 1e6))
      ->capture_default_str();
  command.add_option("--top-k", sampling.top_k, "draw among the k likeliest; 0: among all")
      ->transform(integer_from(0, kMostTokens))
      ->capture_default_str();
}

/// Adds an option that names a file of weights, and two options that say how to read it.
void add_weights(CLI::App& command, WeightsFile& weights, const std::string& option, const std::string& help) {
  CLI::Option* const path = command.add_option(option, weights.path, help)->check(not_empty());
  command
      .add_option("--weights-part", weights.part,
                  "which of several dictionaries in that file: its keys, with slashes between; default: the one with "
                  "the model's names")
      ->check(not_empty())
      ->needs(path);
  command
      .add_option("--weights-without", weights.without,
                  "pieces of that file's names to leave out, such as module.,_orig_mod.")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->needs(path);
}

void add_training(CLI::App& command, TrainCommand& train) {
  command.add_option("--model", train.model, "model file (JSON, docs/models.md), or a folder of Hugging Face")
      ->check(not_empty());
  command
      .add_option("--init-from", train.init_from,
                  "weights to start from: a folder of Hugging Face, which is the model too, or a safetensors file")
      ->check(not_empty());
  add_weights(
      command, train.load_weights, "--load-weights",
      "weights to start from, by Tessera's names: a file of PyTorch's save, of C++ or Python, or of --save-weights");
  command.add_option("--strategy", train.strategy, "strategy file (JSON, docs/strategy.md)")
      ->required()
      ->check(not_empty());
  command.add_option("--data", train.data.path, "file of tokens, or folder of text")->required()->check(not_empty());
  command
      .add_option(
          "--tokenizer", train.data.tokenizer,
          "of text: a tokenizer.json, its folder, or bytes; default: that of --init-from or --model, else bytes")
      ->check(not_empty());
  command.add_option("--data-format", train.data.format, "auto, text, llmc or megatron")->capture_default_str();
  command.add_option("--extensions", train.data.extensions, "of a folder's text files, such as .h,.hpp")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command.add_option("--steps", train.steps, "optimizer steps")->required()->transform(integer_from(1, kMostSteps));
  command.add_option("--batch", train.batch, "samples of one rank's microbatch")
      ->required()
      ->transform(integer_from(1, kMostBatch));
  command
      .add_option("--global-batch", train.global_batch,
                  "samples of a step over all ranks, whatever their number: gradients of as many microbatches are "
                  "accumulated as it takes; default: what gradient_accumulation makes")
      ->transform(integer_from(1, kMostSteps));
  command.add_option("--seq-len", train.data.seq_len, "tokens of a sample; default: the model's")
      ->transform(integer_from(1, kMostTokens));
  command.add_option("--seed", train.seed, "of weights and data order; sampling takes it too")
      ->transform(integer_from(0, INT64_MAX))
      ->capture_default_str();
  command.add_option("--tail", train.pad_tail, "an epoch's last, short step: drop or pad")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"drop", false}, {"pad", true}}));
  command.add_option("--log-every", train.status.every, "steps between status lines")
      ->transform(integer_from(1, kMostSteps))
      ->capture_default_str();
  command
      .add_option(
          "--show", train.status.show,
          "what status lines have too: share, the share of time in communication, and the scaled speed-up; data, "
          "the share of time without data; flops, TFLOP/s of a rank, and MFU where the device's peak is known; "
          "straggler, the rank that the others waited for, and how long")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(CLI::IsMember({"share", "data", "flops", "straggler"}));
  command
      .add_option("--histogram-every", train.status.histogram_every,
                  "steps between latencies of gathers and reductions, by unit, in the metrics; 0: none")
      ->transform(integer_from(0, kMostSteps))
      ->capture_default_str();
  command
      .add_option("--peak-tflops", train.status.peak_tflops,
                  "the peak of a rank's device in TFLOP/s, for MFU; default: as it is known")
      ->check(number_from(1e-9, 1e9));
}

void add_other_processor(CLI::App& command, bool& allows) {
  command.add_flag("--allow-other-processor", allows,
                   "of a run with \"reproducible\": go on with other threads or instructions than the checkpoint or "
                   "commit names, and so with other bits; otherwise that is an error");
}

void add_checkpoints(CLI::App& command, CheckpointOptions& checkpoints) {
  command
      .add_option("--checkpoint-dir", checkpoints.folder,
                  "folder for checkpoints; one is made after the last step too; default: the strategy file's "
                  "checkpoint.dir")
      ->check(not_empty());
  command
      .add_option("--every-steps", checkpoints.every_steps,
                  "steps between checkpoints; 0: not by steps; default: the strategy file's")
      ->transform(integer_from(0, kMostSteps));
  command
      .add_option("--every-minutes", checkpoints.every_minutes,
                  "minutes between checkpoints; 0: not by time; default: the strategy file's")
      ->check(number_from(0, 1e6));
  command
      .add_option("--keep", checkpoints.keep, "checkpoints that stay, the newest; 0: all; default: the strategy file's")
      ->transform(integer_from(0, kMostSteps));
  command.add_flag(
      "--keep-best", checkpoints.keep_best,
      "a checkpoint too whenever the loss on --eval-data is the least so far; it stays, and `best` names it");
  command
      .add_option("--signal-exit-code", checkpoints.signal_exit_code,
                  "of a run that SIGTERM or SIGUSR1 ended, after its checkpoint; 75: schedulers may start it again")
      ->transform(integer_from(0, 255))
      ->capture_default_str();
  command
      .add_option("--resume", checkpoints.resume,
                  "auto: from the latest in --checkpoint-dir, or a later commit (\"durable\"); none; or a checkpoint")
      ->check(not_empty())
      ->capture_default_str();
  add_other_processor(command, checkpoints.allows_other_processor);
}

void add_outputs(CLI::App& command, TrainCommand& train) {
  command.add_option("--out", train.outputs.folder, "run directory: config.json, metrics.jsonl, weights.pt")
      ->check(not_empty());
  command.add_option("--trace", train.outputs.trace, "file for a Chrome trace of the last 3 steps (opens in Perfetto)")
      ->check(not_empty());
  command
      .add_option("--trace-operators", train.outputs.trace_operators,
                  "file for what LibTorch's profiler saw of rank 0's last 3 steps: operators, and a GPU's kernels")
      ->check(not_empty());
  command
      .add_option(
          "--profile", train.outputs.profile,
          "file for the seconds that one rank takes for each unit, from which tessera plan predicts steps of many")
      ->check(not_empty());
  CLI::Option* const links = command
                                 .add_option("--predict-links", train.predicted_by.links,
                                             "file of tessera doctor --links: status lines show the predicted step too")
                                 ->check(not_empty());
  CLI::Option* const profile = command
                                   .add_option("--predict-profile", train.predicted_by.profile,
                                               "file of --profile of a rank alone, for the same")
                                   ->check(not_empty());
  links->needs(profile);
  profile->needs(links);
  command
      .add_option("--metrics", train.outputs.metrics, "file of a header and a JSON object a step; NAME.csv: a table")
      ->check(not_empty());
  command
      .add_option("--tensorboard", train.outputs.tensorboard, "folder that gets an event file, as TensorBoard reads it")
      ->check(not_empty());
  command.add_option("--save-weights", train.outputs.save_weights, "file for the weights at the end")
      ->check(not_empty());
  command
      .add_option("--export-hf", train.outputs.export_hf, "folder for the model at the end, as transformers reads it")
      ->check(not_empty());
  command.add_flag("--overwrite", train.outputs.overwrite,
                   "replace results that exist; otherwise they are kept, an error");
  command.add_flag("--plan", train.status.plan,
                   "say the whole memory plan, a row a kind of memory, not one line of it");
}

void add_evaluation(CLI::App& command, TrainCommand& train) {
  command.add_option("--eval-data", train.evaluation.data, "held-out tokens, in --data-format: their loss is measured")
      ->check(not_empty());
  command.add_option("--eval-every", train.evaluation.every, "steps between evaluations; 0: after the last step only")
      ->transform(integer_from(0, kMostSteps))
      ->capture_default_str();
  command.add_option("--eval-batches", train.evaluation.batches, "of a rank, for one evaluation; 0: all there are")
      ->transform(integer_from(0, kMostSteps))
      ->capture_default_str();
}

void add_train(CLI::App& app, TrainCommand& train) {
  CLI::App* command = add_command(app, "train");
  add_training(*command, train);
  add_outputs(*command, train);
  add_checkpoints(*command, train.checkpoints);
  add_evaluation(*command, train);
  add_sampling(*command, train.sample, "--sample-tokens");
}

void add_replay(CLI::App& app, ReplayCommand& replay) {
  CLI::App* command = add_command(app, "replay");
  command->footer(
      "Behind \"--\" stand the arguments of the tessera train that made the run, with or without its first words.");
  command
      ->add_option("--from", replay.from,
                   "a checkpoint of the run before that step, or the folder with them; none: from the run's start on")
      ->required()
      ->check(not_empty());
  command->add_option("--step", replay.step, "the step to make again, and to compare")
      ->required()
      ->transform(integer_from(1, kMostSteps));
  command->add_option("--ranks", replay.ranks, "processes that make it, on this machine")
      ->transform(integer_from(1, kMostLaunched))
      ->capture_default_str();
  command
      ->add_option(
          "--find", replay.find,
          "nonfinite: the first microbatch, operator and unit whose result is NaN or infinite; divergence: the "
          "first step and unit whose hash is not the recorded one")
      ->check(CLI::IsMember({"nonfinite", "divergence"}));
  command
      ->add_option("--hashes", replay.hashes,
                   "file that the run's record_hashes wrote; default: where its arguments say, if it is there")
      ->check(not_empty());
  command
      ->add_option("--microbatches", replay.microbatches,
                   "of a step, over all ranks; default: as the file of hashes, --global-batch or the checkpoint says")
      ->transform(integer_from(1, kMostSteps));
  add_other_processor(*command, replay.run.checkpoints.allows_other_processor);
}

/// Reads the words after "--" as a command line of `tessera train`. The whole line that started the run may be given:
/// words before its word "train" are ignored. Returns an exit code if the program ends here.
std::optional<int> read_run(TrainCommand& run, std::vector<std::string> words) {
  const auto command = std::ranges::find(words, "train");
  if (!words.front().starts_with("-") && command != words.end()) words.erase(words.begin(), command + 1);
  words.insert(words.begin(), {"tessera", "train"});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  CommandLine line;
  add_train(line.app, run);
  return line.parse(static_cast<int>(argv.size()), argv.data());
}

/// Repeats a step of the run that `words` started.
int replay_run(ReplayCommand& replay, std::vector<std::string> words) {
  if (words.empty())
    return refuse(
        "replay: nothing says how the run was started. [T0933] hint: give the arguments of its tessera train behind "
        "\"--\", as in tessera replay --from runs/a/checkpoints --step 107 -- --model m.json --strategy s.json ...");
  if (const auto code = read_run(replay.run, std::move(words))) return *code;
  return run_replay(replay);
}

/// Makes a checkpoint of the commits of the run that `words` started.
int save_commits(FromCommitsCommand& from, std::vector<std::string> words) {
  if (words.empty())
    return refuse(
        "checkpoint from-commits: nothing says how the run was started. [T1092] hint: give the arguments of its "
        "tessera train behind \"--\", as in tessera checkpoint from-commits runs/a/commits --to runs/a/checkpoints -- "
        "--model m.json "
        "--strategy s.json ...");
  if (const auto code = read_run(from.run, std::move(words))) return *code;
  return run_from_commits(from);
}

void add_serve(CLI::App& app, ServeCommand& serve) {
  CLI::App* command = add_command(app, "serve");
  command
      ->add_option("--listen", serve.listen,
                   "HOST:PORT by which ranks reach this server; port 0: a free one. TESSERA_SERVERS_SECRET has the "
                   "secret that ranks must say")
      ->check(not_empty())
      ->capture_default_str();
  command
      ->add_option("--state", serve.state,
                   "folder in which shards are kept: a server that is started again with the same address and folder "
                   "goes on with the run")
      ->check(not_empty());
  command
      ->add_option("--lose", serve.lose, "with --state: the most pushes to each shard that the server's end may lose")
      ->transform(integer_from(0, KeepOptions::kMostLose))
      ->capture_default_str();
  command
      ->add_option("--offload", serve.offload,
                   "folder on a local disk for a scratch file with the shards; without it they are in memory")
      ->check(not_empty());
}

void add_sample(CLI::App& app, SampleCommand& sample) {
  CLI::App* command = add_command(app, "sample");
  command->add_option("--model", sample.model, "model file (JSON), or a folder of Hugging Face")
      ->required()
      ->check(not_empty());
  add_weights(
      *command, sample.weights, "--weights",
      "file of PyTorch's save or of tessera train --save-weights, or safetensors; default: those of the folder of "
      "Hugging Face");
  command
      ->add_option("--tokenizer", sample.tokenizer,
                   "a tokenizer.json, its folder, or bytes; default: that of --model, else bytes")
      ->check(not_empty());
  sample.sample.tokens = 200;
  add_sampling(*command, sample.sample, "--tokens");
  command->add_option("--seed", sample.sample.seed, "the same seed draws the same text")
      ->transform(integer_from(0, INT64_MAX))
      ->capture_default_str();
}

void add_tokenize(CLI::App& app, TokenizeCommand& tokenize) {
  CLI::App* command = add_command(app, "tokenize");
  command->add_option("--tokenizer", tokenize.tokenizer, "tokenizer.json, or the folder that holds it")
      ->required()
      ->check(not_empty());
  command->add_option("--data", tokenize.data, "file or folder of text")->required()->check(not_empty());
  command->add_option("--extensions", tokenize.extensions, "of a folder's text files, such as .h,.hpp")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--out", tokenize.out, "prefix of the files PREFIX.idx and PREFIX.bin")
      ->required()
      ->check(not_empty());
  command->add_option("--end", tokenize.end, "token to put behind each file, such as <|endoftext|>");
  command->add_flag("--overwrite", tokenize.overwrite, "replace results that exist; otherwise they are kept, an error");
}

void add_world(CLI::App& command, WorldCommand& world, const char* strategy_is = "strategy file (JSON)") {
  command.add_option("--model", world.model, "model file (JSON)")->required()->check(not_empty());
  command.add_option("--strategy", world.strategy, strategy_is)->required()->check(not_empty());
  command.add_option("--world-size", world.world_size, "ranks")->required()->transform(integer_from(1, kMostRanks));
  command.add_option("--hosts", world.hosts, "hosts that the ranks are spread over")
      ->transform(integer_from(1, kMostRanks))
      ->capture_default_str();
}

/// Adds the options for measurements. Returns --links and --profile.
std::pair<CLI::Option*, CLI::Option*> add_timing(CLI::App& command, TimingOptions& timing) {
  CLI::Option* const links =
      command.add_option("--links", timing.links, "file of tessera doctor --links, between hosts")->check(not_empty());
  CLI::Option* const profile =
      command.add_option("--profile", timing.profile, "file of tessera train --profile, of a rank alone")
          ->check(not_empty());
  command
      .add_option("--links-inside", timing.links_inside,
                  "the same as --links between ranks of one host, for axes that lie in hosts; default: --links")
      ->check(not_empty())
      ->needs(links);
  command.add_option("--servers", timing.servers, "parameter servers, where \"sync\" has some; default: 1")
      ->transform(integer_from(1, kMostRanks))
      ->needs(links);
  return {links, profile};
}

/// Adds the options that say how ranks differ. The help of each option begins with `when`.
void add_unlike_ranks(CLI::App& command, UnlikeRanks& ranks, const std::string& when) {
  command.add_option("--jitter", ranks.jitter, when + "relative standard deviation of what ranks compute")
      ->check(number_from(0, 10))
      ->capture_default_str();
  command
      .add_option(
          "--straggler", ranks.stragglers,
          when + "ranks, and how many times as long their work takes, such as 7=1.5; several, with commas between")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(not_empty());
  command
      .add_option("--stall", ranks.stall,
                  when + "share of its steps in which each rank stands still, and seconds, such as 0.02=1")
      ->check(not_empty());
}

void add_plan(CLI::App& app, PlanCommand& plan) {
  CLI::App* command = add_command(app, "plan");
  add_world(*command, plan.world, "strategy file (JSON), or auto: all are compared by time");
  const auto [links, profile] = add_timing(*command, plan.timing);
  links->needs(profile);
  profile->needs(links);
  command->add_option("--like", plan.like, "with --strategy auto: strategy file with the other keys; default: theirs")
      ->check(not_empty());
  command
      ->add_option("--accumulations", plan.accumulations,
                   "with --strategy auto: microbatches of a step to try, such as 1,2,4; default: as --like has them")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  CLI::Option* const write =
      command->add_option("--write", plan.write, "with --strategy auto: file for the strategy that is chosen")
          ->check(not_empty());
  command->add_flag("--overwrite", plan.overwrite, "replace a file of --write that exists")->needs(write);
  add_unlike_ranks(*command, plan.ranks,
                   "with --strategy auto, which then compares modes of \"sync\", or with deal.backups: ");
  command->add_flag("--measure-disks", plan.measure_disks,
                    "how long a step's traffic takes on the disks of offload.paths, measured here and now");
  command->add_flag("--json", plan.json, "for programs");
}

void add_simulate(CLI::App& app, SimulateCommand& simulate) {
  CLI::App* command = add_command(app, "simulate");
  add_world(*command, simulate.world);
  const auto [links, profile] = add_timing(*command, simulate.timing);
  links->required();
  profile->required();
  add_unlike_ranks(*command, simulate.ranks, "");
  command->add_option("--steps", simulate.steps, "steps to play")
      ->transform(integer_from(1, 100000))
      ->capture_default_str();
  command->add_option("--seed", simulate.seed, "the same seed draws the same world")
      ->transform(integer_from(0, INT64_MAX))
      ->capture_default_str();
  command->add_option("--trace", simulate.trace, "file for a Chrome trace (opens in Perfetto)")->check(not_empty());
  command->add_option("--traced-ranks", simulate.traced_ranks, "in the trace, the first so many")
      ->transform(integer_from(1, 64))
      ->capture_default_str();
  command
      ->add_option("--order", simulate.order,
                   "\"sync\" asynchronous: file for the order of pushes and pulls, which \"play_order\" plays")
      ->check(not_empty());
  command->add_flag("--overwrite", simulate.overwrite, "replace a trace or an order that exists");
}

void add_export(CLI::App& command, CheckpointCommand& checkpoint) {
  command.add_option("folder", checkpoint.folder, "folder for the model")->required()->check(not_empty());
  command.add_option("--dtype", checkpoint.dtype, "of the weights: fp32, as the checkpoint has them, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_flag("--overwrite", checkpoint.overwrite,
                   "replace a model that is there; otherwise it is kept, an error");
}

void add_from_commits(CLI::App& checkpoint, FromCommitsCommand& from) {
  CLI::App* command = checkpoint.add_subcommand("from-commits", "a checkpoint of the last commit of \"durable\"");
  command->footer(
      "Behind \"--\" stand the arguments of the tessera train that committed, with or without its first words. Its "
      "ranks are started here, and make no step. The checkpoint goes on with any number of ranks.");
  command->add_option("commits", from.commits, "folder of commits, with the files of all ranks")
      ->required()
      ->check(not_empty());
  command->add_option("--to", from.to, "folder of checkpoints that gets the new one")->required()->check(not_empty());
  command
      ->add_option("--hosts", from.hosts,
                   "on which the ranks ran that committed, equally many on each; default: as the commits say")
      ->transform(integer_from(1, kMostLaunched));
}

void add_checkpoint(CLI::App& app, CheckpointCommand& checkpoint, FromCommitsCommand& from) {
  CLI::App* command = add_command(app, "checkpoint");
  command->require_subcommand(1);
  const std::pair<const char*, const char*> kinds[] = {{"ls", "the checkpoints of a folder"},
                                                       {"show", "what a checkpoint holds"},
                                                       {"verify", "read and hash every byte"},
                                                       {"diff", "what differs between two"},
                                                       {"reshard", "write one anew, in another number of files"},
                                                       {"export", "the weights, as a model of Hugging Face"}};
  for (const auto& [name, text] : kinds) {
    CLI::App* each = command->add_subcommand(name, text);
    each->add_option("path", checkpoint.path, "a checkpoint, or a folder of checkpoints")
        ->required()
        ->check(not_empty());
    if (std::string_view(name) == "show") each->add_flag("--json", checkpoint.json, "the manifest, for programs");
    if (std::string_view(name) == "export") add_export(*each, checkpoint);
    if (std::string_view(name) == "reshard") {
      each->add_option("to", checkpoint.to, "folder for the new checkpoint")->required()->check(not_empty());
      each->add_option("--files", checkpoint.files, "of about as many elements each")
          ->required()
          ->transform(integer_from(1, kMostShards));
    }
    if (std::string_view(name) != "diff") continue;
    each->add_option("other", checkpoint.other, "likewise")->required()->check(not_empty());
  }
  add_from_commits(*command, from);
}

}  // namespace

int run_command_line(int argc, char** argv) {
  CommandLine line;
  TrainCommand train;
  ReplayCommand replay;
  ServeCommand serve;
  SampleCommand sample;
  TokenizeCommand tokenize;
  PlanCommand plan;
  SimulateCommand simulate;
  CheckpointCommand checkpoint;
  FromCommitsCommand from_commits;
  add_train(line.app, train);
  add_replay(line.app, replay);
  add_serve(line.app, serve);
  add_sample(line.app, sample);
  add_tokenize(line.app, tokenize);
  add_plan(line.app, plan);
  add_checkpoint(line.app, checkpoint, from_commits);
  add_simulate(line.app, simulate);
  train.command_line.assign(argv, argv + argc);
  replay.words.assign(argv + std::min(argc, 1), argv + argc);
  from_commits.words = replay.words;
  std::vector<std::string> run_words;
  const auto is = [&](int i, std::string_view word) { return argc > i && word == argv[i]; };
  if (is(1, "replay") || (is(1, "checkpoint") && is(2, "from-commits")))
    run_words = take_words_behind_dashes(argc, argv);
  if (const auto code = line.parse(argc, argv)) return *code;
  train.sample.seed = train.seed;
  if (line.got("train")) return run_train(train);
  if (line.got("replay")) return replay_run(replay, std::move(run_words));
  if (line.got("serve")) return run_serve(serve);
  if (line.got("sample")) return run_sample(sample);
  if (line.got("tokenize")) return run_tokenize(tokenize);
  if (line.got("plan")) return run_plan(plan);
  if (line.got("simulate")) return run_simulate(simulate);
  if (line.got("checkpoint", "from-commits")) return save_commits(from_commits, std::move(run_words));
  if (line.got("checkpoint", "ls")) return run_checkpoint_ls(checkpoint);
  if (line.got("checkpoint", "show")) return run_checkpoint_show(checkpoint);
  if (line.got("checkpoint", "verify")) return run_checkpoint_verify(checkpoint);
  if (line.got("checkpoint", "reshard")) return run_checkpoint_reshard(checkpoint);
  if (line.got("checkpoint", "export")) return run_checkpoint_export(checkpoint);
  return run_checkpoint_diff(checkpoint);
}

}  // namespace tessera::app
