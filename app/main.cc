// tessera <command> ...: reads the command line, and nothing else.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "app/commands.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_docs.h"
#include "runtime/launch/launcher.h"

namespace tessera::app {
namespace {

void add_sampling(CLI::App& command, TextSampling& sampling, const std::string& tokens_option) {
  command.add_option("--prompt", sampling.prompt, "text to continue")->capture_default_str();
  command.add_option(tokens_option, sampling.tokens, "bytes to generate")->check(CLI::NonNegativeNumber);
  command.add_option("--temperature", sampling.temperature, "0: always the likeliest byte")->capture_default_str();
  command.add_option("--top-k", sampling.top_k, "draw among the k likeliest; 0: among all")->capture_default_str();
}

void add_train(CLI::App& app, TrainCommand& train) {
  CLI::App* command = app.add_subcommand("train", "train a model; one process a rank");
  command->add_option("--model", train.model, "model file (JSON)")->required();
  command->add_option("--strategy", train.strategy, "strategy file (JSON, docs/strategy.md)")->required();
  command->add_option("--data", train.data, "file of tokens, or folder of text")->required();
  command->add_option("--data-format", train.data_format, "auto, text, llmc or megatron")->capture_default_str();
  command->add_option("--extensions", train.extensions, "of a folder's text files, such as .h,.hpp")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--steps", train.steps, "optimizer steps")->required();
  command->add_option("--batch", train.batch, "samples of one rank's microbatch")->required();
  command->add_option("--seq-len", train.seq_len, "tokens of a sample; default: the model's");
  command->add_option("--seed", train.seed, "of weights and data order; sampling takes it too")->capture_default_str();
  command->add_option("--tail", train.pad_tail, "an epoch's last, short step: drop or pad")
      ->transform(CLI::CheckedTransformer(std::map<std::string, bool>{{"drop", false}, {"pad", true}}));
  command->add_option("--trace", train.trace, "file for a Chrome trace of the last 3 steps (opens in Perfetto)");
  command->add_option("--metrics", train.metrics, "file that gets a JSON object a step");
  command->add_option("--log-every", train.log_every, "steps between status lines")->capture_default_str();
  command->add_option("--save-weights", train.save_weights, "file for the weights at the end");
  add_sampling(*command, train.sample, "--sample-tokens");
}

void add_sample(CLI::App& app, SampleCommand& sample) {
  CLI::App* command = app.add_subcommand("sample", "continue a text with saved weights, byte by byte");
  command->add_option("--model", sample.model, "model file (JSON)")->required();
  command->add_option("--weights", sample.weights, "file of tessera train --save-weights")->required();
  sample.sample.tokens = 200;
  add_sampling(*command, sample.sample, "--tokens");
  command->add_option("--seed", sample.sample.seed, "the same seed draws the same text")->capture_default_str();
}

void add_plan(CLI::App& app, PlanCommand& plan) {
  CLI::App* command = app.add_subcommand("plan", "memory and traffic of every rank, without running anything");
  command->add_option("--model", plan.model, "model file (JSON)")->required();
  command->add_option("--strategy", plan.strategy, "strategy file (JSON)")->required();
  command->add_option("--world-size", plan.world_size, "ranks")->required();
  command->add_option("--hosts", plan.hosts, "hosts that the ranks are spread over")->capture_default_str();
  command->add_flag("--json", plan.json, "for programs");
}

void add_launch(CLI::App& app, LaunchOptions& launch) {
  CLI::App* command = app.add_subcommand("launch", "start ranks on this machine: tessera launch -n 4 -- program args");
  command->add_option("-n,--ranks", launch.ranks, "ranks to start")->capture_default_str();
  command->add_option("--hosts", launch.hosts, "pretended hosts, for tests")->capture_default_str();
  command->add_option("--port", launch.port, "rendezvous port; 0: a free one")->capture_default_str();
  command->add_option("--grace", launch.grace_s, "seconds for the other ranks after a failure")->capture_default_str();
  command->add_flag("!--no-prefix", launch.prefix, "do not put [rank n] before lines");
}

void add_bench(CLI::App& app, BenchCommand& bench) {
  CLI::App* command = app.add_subcommand(
      "bench", "measure steps, memory, buckets, and collectives and optimizer steps beside this machine's limits");
  command->require_subcommand(1);
  CLI::App* collectives = command->add_subcommand("collectives", "every collective, 4 B to 128 MiB");
  CLI::App* optimizer = command->add_subcommand("optimizer", "the update of 32 Mi parameters, one thread");
  optimizer->add_flag("--gpu", bench.gpu, "of 1 Gi parameters on the GPU");
  CLI::App* buckets = command->add_subcommand("buckets", "NO_SHARD with buckets of 0.5 to 64 MiB: ResNet-18, GPT");
  CLI::App* step = command->add_subcommand("step", "a GPT's step and its parts under every strategy");
  CLI::App* memory = command->add_subcommand("memory", "what every strategy takes, beside its plan");
  CLI::App* overhead = command->add_subcommand("overhead", "what an operator costs the host");
  for (CLI::App* each : {collectives, buckets, step, memory, overhead}) {
    each->add_option("-n,--ranks", bench.ranks, "ranks to start, where no launcher has")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    each->add_option("--transport", bench.transport, "host or gloo; default: the best there is")
        ->check(CLI::IsMember({"host", "gloo"}));
  }
  buckets->add_option("--csv", bench.csv, "file that gets the table");
  buckets->add_option("--cifar10", bench.cifar10, "folder of CIFAR-10's binary files; default: generated images");
  for (CLI::App* each : {collectives, optimizer, buckets, step, memory, overhead}) {
    each->add_option("--json", bench.json, "file that gets every sample");
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

int run(int argc, char** argv) {
  CLI::App app("Tessera trains LibTorch modules with parameters, gradients and optimizer state sharded over ranks.",
               "tessera");
  app.require_subcommand(1);
  // Said twice, the last one counts, so that a script can append to a command line. Subcommands inherit it.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  TrainCommand train;
  SampleCommand sample;
  PlanCommand plan;
  BenchCommand bench;
  LaunchOptions launching;
  add_train(app, train);
  add_sample(app, sample);
  add_plan(app, plan);
  add_bench(app, bench);
  add_launch(app, launching);
  app.add_subcommand("doctor", "what this machine offers, and how to mend what it lacks");
  app.add_subcommand("schema", "print the JSON schema of the strategy file");

  launching.command = take_program(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::kUsage);
  }
  train.sample.seed = train.seed;
  if (app.got_subcommand("train")) return run_train(train);
  if (app.got_subcommand("sample")) return run_sample(sample);
  if (app.got_subcommand("plan")) return run_plan(plan);
  if (app.got_subcommand("launch")) return launch(launching);
  if (const CLI::App* command = app.get_subcommand("bench"); command->parsed()) {
    const std::pair<const char*, int (*)(const BenchCommand&)> sections[] = {
        {"collectives", run_bench_collectives}, {"optimizer", run_bench_optimizer},
        {"buckets", run_bench_buckets},         {"step", run_bench_step},
        {"memory", run_bench_memory},           {"overhead", run_bench_overhead}};
    for (const auto& [name, run_section] : sections) {
      if (command->got_subcommand(name)) return run_section(bench);
    }
  }
  if (app.got_subcommand("doctor")) return run_doctor();
  std::fputs(strategy_schema().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace tessera::app

int main(int argc, char** argv) { return tessera::app::run(argc, argv); }
