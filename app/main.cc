// tessera <command> ...: reads the command line, and nothing else.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "app/command_line.h"
#include "app/commands.h"
#include "app/import/translate.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/config/strategy_docs.h"
#include "runtime/launch/launcher.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kMostShards = 65536;
constexpr std::int64_t kMostSteps = 1'000'000'000'000;
constexpr std::int64_t kMostBatch = 1 << 20;
constexpr std::int64_t kMostTokens = 1 << 27;
constexpr std::int64_t kMostRanks = 1 << 24;  // of a plan: as many as a launcher may say there are
constexpr std::int64_t kMostLaunched = 1024;  // on one machine
constexpr std::int64_t kMostRestarts = 1000;

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

void add_training(CLI::App& command, TrainCommand& train) {
  command.add_option("--model", train.model, "model file (JSON, docs/models.md), or a folder of Hugging Face")
      ->check(not_empty());
  command
      .add_option("--init-from", train.init_from,
                  "weights to start from: a folder of Hugging Face, which is the model too, or a safetensors file")
      ->check(not_empty());
  command.add_option("--strategy", train.strategy, "strategy file (JSON, docs/strategy.md)")
      ->required()
      ->check(not_empty());
  command.add_option("--data", train.data, "file of tokens, or folder of text")->required()->check(not_empty());
  command
      .add_option(
          "--tokenizer", train.tokenizer,
          "of text: a tokenizer.json, its folder, or bytes; default: that of --init-from or --model, else bytes")
      ->check(not_empty());
  command.add_option("--data-format", train.data_format, "auto, text, llmc or megatron")->capture_default_str();
  command.add_option("--extensions", train.extensions, "of a folder's text files, such as .h,.hpp")
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
  command.add_option("--seq-len", train.seq_len, "tokens of a sample; default: the model's")
      ->transform(integer_from(1, kMostTokens));
  command.add_option("--seed", train.seed, "of weights and data order; sampling takes it too")
      ->transform(integer_from(0, INT64_MAX))
      ->capture_default_str();
  command.add_option("--tail", train.pad_tail, "an epoch's last, short step: drop or pad")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"drop", false}, {"pad", true}}));
  command.add_option("--log-every", train.log_every, "steps between status lines")
      ->transform(integer_from(1, kMostSteps))
      ->capture_default_str();
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
}

void add_outputs(CLI::App& command, TrainCommand& train) {
  command.add_option("--out", train.out, "run directory: config.json, metrics.jsonl, weights.pt")->check(not_empty());
  command.add_option("--trace", train.trace, "file for a Chrome trace of the last 3 steps (opens in Perfetto)")
      ->check(not_empty());
  command
      .add_option("--trace-operators", train.trace_operators,
                  "file for what LibTorch's profiler saw of rank 0's last 3 steps: operators, and a GPU's kernels")
      ->check(not_empty());
  command
      .add_option(
          "--profile", train.profile,
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
  command.add_option("--metrics", train.metrics, "file of a header and a JSON object a step; NAME.csv: a table")
      ->check(not_empty());
  command.add_option("--tensorboard", train.tensorboard, "folder that gets an event file, as TensorBoard reads it")
      ->check(not_empty());
  command.add_option("--save-weights", train.save_weights, "file for the weights at the end")->check(not_empty());
  command.add_option("--export-hf", train.export_hf, "folder for the model at the end, as transformers reads it")
      ->check(not_empty());
  command.add_flag("--overwrite", train.overwrite, "replace results that exist; otherwise they are kept, an error");
}

void add_evaluation(CLI::App& command, TrainCommand& train) {
  command.add_option("--eval-data", train.eval_data, "held-out tokens, in --data-format: their loss is measured")
      ->check(not_empty());
  command.add_option("--eval-every", train.eval_every, "steps between evaluations; 0: after the last step only")
      ->transform(integer_from(0, kMostSteps))
      ->capture_default_str();
  command.add_option("--eval-batches", train.eval_batches, "of a rank, for one evaluation; 0: all there are")
      ->transform(integer_from(0, kMostSteps))
      ->capture_default_str();
}

void add_train(CLI::App& app, TrainCommand& train) {
  CLI::App* command = app.add_subcommand("train", "train a model; one process a rank");
  add_training(*command, train);
  add_outputs(*command, train);
  add_checkpoints(*command, train.checkpoints);
  add_evaluation(*command, train);
  add_sampling(*command, train.sample, "--sample-tokens");
}

void add_sample(CLI::App& app, SampleCommand& sample) {
  CLI::App* command = app.add_subcommand("sample", "continue a text with saved weights");
  command->add_option("--model", sample.model, "model file (JSON), or a folder of Hugging Face")
      ->required()
      ->check(not_empty());
  command
      ->add_option("--weights", sample.weights,
                   "file of tessera train --save-weights, or safetensors; default: those of the folder of Hugging Face")
      ->check(not_empty());
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
  CLI::App* command = app.add_subcommand("tokenize", "turn text into tokens on disk, in Megatron's format");
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

/// Returns --links and --profile.
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
  return {links, profile};
}

void add_plan(CLI::App& app, PlanCommand& plan) {
  CLI::App* command = app.add_subcommand("plan", "memory, traffic and time of every rank, without running anything");
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
  command->add_flag("--measure-disks", plan.measure_disks,
                    "how long a step's traffic takes on the disks of offload.paths, measured here and now");
  command->add_flag("--json", plan.json, "for programs");
}

void add_simulate(CLI::App& app, SimulateCommand& simulate) {
  CLI::App* command =
      app.add_subcommand("simulate", "steps of many ranks that are not alike, from measurements of few");
  add_world(*command, simulate.world);
  const auto [links, profile] = add_timing(*command, simulate.timing);
  links->required();
  profile->required();
  command->add_option("--jitter", simulate.jitter, "relative standard deviation of what ranks compute")
      ->check(number_from(0, 10))
      ->capture_default_str();
  command
      ->add_option("--straggler", simulate.stragglers,
                   "ranks, and how many times as long their work takes, such as 7=1.5; several, with commas between")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(not_empty());
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
  command->add_flag("--overwrite", simulate.overwrite, "replace a trace that exists");
}

void add_doctor(CLI::App& app, DoctorCommand& doctor) {
  CLI::App* command = app.add_subcommand("doctor", "what this machine offers, and how to mend what it lacks");
  command->add_option("--disk", doctor.disks, "directories of disks to measure, with a scratch file of 1 GiB on each")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(not_empty());
  CLI::Option* const links =
      command
          ->add_option("--links", doctor.links,
                       "started as training is, on every rank: file for the times of collectives between them")
          ->check(not_empty());
  command->add_option("--transport", doctor.transport, "of --links: host or gloo; default: the best there is")
      ->check(CLI::IsMember({"host", "gloo"}))
      ->needs(links);
  command->add_flag("--overwrite", doctor.overwrite, "replace a file of --links that exists")->needs(links);
}

void add_import_config(CLI::App& app, ImportConfigCommand& config) {
  CLI::App* command =
      app.add_subcommand("import-config", "a configuration of DeepSpeed, Accelerate or FSDP as a strategy file");
  command->add_option("file", config.file, "JSON or YAML (docs/import-config.md)")->required()->check(not_empty());
  command->add_option("--format", config.format, "deepspeed, accelerate or fsdp; default: the keys tell")
      ->check(CLI::IsMember(import_format_names()));
  command->add_option("--out", config.out, "strategy file; default: stdout")->check(not_empty());
  command->add_flag("--overwrite", config.overwrite, "replace a file that exists; otherwise it is kept, an error");
  command->add_flag("--skip-refused", config.skip_refused, "leave out keys that the strategy cannot say");
}

void add_launch(CLI::App& app, LaunchOptions& launch) {
  CLI::App* command = app.add_subcommand("launch", "start ranks on this machine: tessera launch -n 4 -- program args");
  command->add_option("-n,--ranks", launch.ranks, "ranks to start")
      ->transform(integer_from(1, kMostLaunched))
      ->capture_default_str();
  command->add_option("--hosts", launch.hosts, "pretended hosts, for tests")
      ->transform(integer_from(1, kMostLaunched))
      ->capture_default_str();
  command->add_option("--port", launch.port, "rendezvous port; 0: a free one")
      ->transform(integer_from(0, 65535))
      ->capture_default_str();
  command->add_option("--grace", launch.grace_s, "seconds for the other ranks after a failure")
      ->check(number_from(0, 1e6))
      ->capture_default_str();
  command
      ->add_option("--max-restarts", launch.max_restarts,
                   "starts of all ranks again, after failures that may not come back")
      ->transform(integer_from(0, kMostRestarts))
      ->capture_default_str();
  command->add_flag("!--no-prefix", launch.prefix, "do not put [rank n] before lines");
  command->prefix_command();  // the first word that is no option is the program, with or without a "--" before it
}

void add_export(CLI::App& command, CheckpointCommand& checkpoint) {
  command.add_option("folder", checkpoint.folder, "folder for the model")->required()->check(not_empty());
  command.add_option("--dtype", checkpoint.dtype, "of the weights: fp32, as the checkpoint has them, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_flag("--overwrite", checkpoint.overwrite,
                   "replace a model that is there; otherwise it is kept, an error");
}

void add_checkpoint(CLI::App& app, CheckpointCommand& checkpoint) {
  CLI::App* command = app.add_subcommand("checkpoint", "look at checkpoints and export them, without a model");
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
}

void add_bench(CLI::App& app, BenchCommand& bench) {
  CLI::App* command = app.add_subcommand(
      "bench", "measure steps, memory, buckets, and collectives and optimizer steps beside this machine's limits");
  command->require_subcommand(1);
  CLI::App* collectives = command->add_subcommand("collectives", "every collective, 4 B to 128 MiB");
  collectives->add_flag("--fit", bench.fit,
                        "time every algorithm over gloo instead, fit what rounds, messages, bytes and additions cost, "
                        "and show the choice");
  collectives
      ->add_option("--fit-file", bench.fit_file,
                   "file that gets the fit, which \"comm\": {\"network_fit\": FILE} names to training")
      ->check(not_empty())
      ->needs("--fit");
  CLI::App* optimizer = command->add_subcommand("optimizer", "the update of 32 Mi parameters, one thread");
  CLI::Option* gpu = optimizer->add_flag("--gpu", bench.gpu, "of 1 Gi parameters on the GPU");
  optimizer->add_option("--parameters", bench.parameters, "so many of them instead")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 34));
  optimizer
      ->add_option("--isa", bench.isa, "loops for portable, avx2 or avx512 (default: the best that the processor has)")
      ->excludes(gpu);
  CLI::App* offload = command->add_subcommand("offload", "passes over a disk, and optimizer steps with states on it");
  offload->add_option("--dir", bench.directory, "directory for private scratch files")->required()->check(not_empty());
  offload->add_option("--size", bench.disk_bytes, "bytes of a pass over the disk")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{1} << 20, std::int64_t{1} << 44))
      ->capture_default_str();
  offload->add_option("--record", bench.record_bytes, "bytes of one operation, as offload.record")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{1} << 12, std::int64_t{1} << 30))
      ->check([](const std::string& bytes) {
        return std::stoll(bytes) % 4096 == 0 ? "" : "wanted a multiple of 4096, got " + bytes;
      })
      ->capture_default_str();
  offload
      ->add_option("--queue-depth", bench.queue_depth,
                   "records that are read ahead, and as many that are written behind, as offload.queue_depth")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{32}))
      ->capture_default_str();
  offload
      ->add_option("--cache", bench.cache_bytes,
                   "steps with so much memory for records that stay in it, too, as offload.cache gives")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  CLI::App* checkpoint =
      command->add_subcommand("checkpoint", "saves and loads of a checkpoint, beside training and not");
  checkpoint->add_option("--dir", bench.directory, "directory that gets a folder of its own, which is removed")
      ->required()
      ->check(not_empty());
  CLI::App* buckets = command->add_subcommand("buckets", "NO_SHARD with buckets of 0.5 to 64 MiB: ResNet-18, GPT");
  CLI::App* step = command->add_subcommand("step", "a GPT's step and its parts under every strategy");
  CLI::App* memory = command->add_subcommand("memory", "what every strategy takes, beside its plan");
  CLI::App* overhead = command->add_subcommand("overhead", "what an operator costs the host");
  CLI::App* overlap =
      command->add_subcommand("overlap", "how much communication is hidden, with a timed sleep for compute");
  overlap->add_option("--compute", bench.compute_s, "seconds of compute in a step")
      ->check(CLI::Range(0.001, 60.0))
      ->capture_default_str();
  overlap->add_option("--units", bench.units, "units of equal size, of 24 Mi parameters together")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  CLI::App* launches = command->add_subcommand("launches", "what a unit costs the host that feeds a GPU");
  launches->add_flag("--gpu", bench.gpu, "on the GPU; without it on the CPU, to see that it works");
  for (CLI::App* each : {collectives, checkpoint, buckets, step, memory, overhead, overlap}) {
    each->add_option("-n,--ranks", bench.ranks, "ranks to start, where no launcher has")
        ->transform(integer_from(1, kMostLaunched))
        ->capture_default_str();
    each->add_option("--transport", bench.transport, "host or gloo; default: the best there is")
        ->check(CLI::IsMember({"host", "gloo"}));
  }
  buckets->add_option("--csv", bench.csv, "file that gets the table")->check(not_empty());
  buckets->add_option("--cifar10", bench.cifar10, "folder of CIFAR-10's binary files; default: generated images")
      ->check(not_empty());
  for (CLI::App* each :
       {collectives, optimizer, offload, checkpoint, buckets, step, memory, overhead, launches, overlap}) {
    each->add_option("--json", bench.json, "file that gets every sample")->check(not_empty());
    each->add_flag("--overwrite", bench.overwrite, "replace results that exist; otherwise they are kept, an error");
    each->add_flag("--quick", bench.quick, "small sizes, to see that it works");
  }
}

/// What stands behind the first "--" belongs to the program to launch, and is not looked at.
std::vector<std::string> take_program(int& argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--") != 0) continue;
    std::vector<std::string> program(argv + i + 1, argv + argc);
    argc = i;
    return program;
  }
  return {};
}

int refuse(const std::string& what) {
  std::fprintf(stderr, "tessera: %s\n", what.c_str());
  return static_cast<int>(ExitCode::kUsage);
}

/// A program given without "--": its words are those that `launch` did not take. Returns what is wrong with them.
std::string take_words(const CLI::App& command, LaunchOptions& launch) {
  const std::vector<std::string> words = command.remaining();
  if (words.empty()) return "";
  if (words[0].starts_with("-"))
    return "`tessera launch` has no option " + clipped(words[0], 80) + ". hint: tessera launch -n 4 -- program args";
  if (!launch.command.empty())
    return "`tessera launch` got two programs: " + clipped(words[0], 80) + ", and " +
           clipped(launch.command.front(), 80) + " behind the \"--\". hint: tessera launch -n 4 -- program args";
  launch.command = words;
  return "";
}

int run(int argc, char** argv) {
  CLI::App app("Tessera trains LibTorch modules with parameters, gradients and optimizer state sharded over ranks.",
               "tessera");
  app.require_subcommand(1);
  // Said twice, the last one counts, so that a script can append to a command line. Subcommands inherit it.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  TrainCommand train;
  SampleCommand sample;
  TokenizeCommand tokenize;
  ImportConfigCommand import_config;
  PlanCommand plan;
  SimulateCommand simulate;
  DoctorCommand doctor;
  BenchCommand bench;
  CheckpointCommand checkpoint;
  LaunchOptions launching;
  add_train(app, train);
  add_sample(app, sample);
  add_tokenize(app, tokenize);
  add_plan(app, plan);
  add_import_config(app, import_config);
  add_bench(app, bench);
  add_checkpoint(app, checkpoint);
  add_launch(app, launching);
  add_simulate(app, simulate);
  add_doctor(app, doctor);
  app.add_subcommand("schema", "print the JSON schema of the strategy file");

  train.command_line.assign(argv, argv + argc);
  launching.command = take_program(argc, argv);
  if (const std::string slip = unknown_word(app, {argv + std::min(argc, 1), argv + argc}); !slip.empty())
    return refuse(slip);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::kUsage);
  }
  if (const std::string slip = take_words(*app.get_subcommand("launch"), launching); !slip.empty()) return refuse(slip);
  train.sample.seed = train.seed;
  if (app.got_subcommand("train")) return run_train(train);
  if (app.got_subcommand("sample")) return run_sample(sample);
  if (app.got_subcommand("tokenize")) return run_tokenize(tokenize);
  if (app.got_subcommand("plan")) return run_plan(plan);
  if (app.got_subcommand("simulate")) return run_simulate(simulate);
  if (app.got_subcommand("import-config")) return run_import_config(import_config);
  if (app.got_subcommand("launch")) return launch(launching);
  if (const CLI::App* command = app.get_subcommand("bench"); command->parsed()) {
    const std::pair<const char*, int (*)(const BenchCommand&)> sections[] = {
        {"collectives", run_bench_collectives}, {"optimizer", run_bench_optimizer}, {"offload", run_bench_offload},
        {"buckets", run_bench_buckets},         {"step", run_bench_step},           {"memory", run_bench_memory},
        {"checkpoint", run_bench_checkpoint},   {"overhead", run_bench_overhead},   {"overlap", run_bench_overlap},
        {"launches", run_bench_launches}};
    for (const auto& [name, run_section] : sections) {
      if (command->got_subcommand(name)) return run_section(bench);
    }
  }
  if (const CLI::App* command = app.get_subcommand("checkpoint"); command->parsed()) {
    if (command->got_subcommand("ls")) return run_checkpoint_ls(checkpoint);
    if (command->got_subcommand("show")) return run_checkpoint_show(checkpoint);
    if (command->got_subcommand("verify")) return run_checkpoint_verify(checkpoint);
    if (command->got_subcommand("reshard")) return run_checkpoint_reshard(checkpoint);
    if (command->got_subcommand("export")) return run_checkpoint_export(checkpoint);
    return run_checkpoint_diff(checkpoint);
  }
  if (app.got_subcommand("doctor")) return run_doctor(doctor);
  std::fputs(strategy_schema().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace tessera::app

int main(int argc, char** argv) { return tessera::app::run(argc, argv); }
