// tessera-bench: reads the command lines of the commands that measure this machine, and calls these commands.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <utility>

#include "tessera/exit_code.h"
#include "workshop/app/command_line.h"
#include "workshop/app/commands.h"

namespace tessera::app {
namespace {

void add_doctor(CLI::App& app, DoctorCommand& doctor) {
  CLI::App* command = add_command(app, "doctor");
  command->add_option("--disk", doctor.disks, "directories of disks to measure, with a scratch file of 1 GiB on each")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(not_empty());
  CLI::Option* const links =
      command
          ->add_option("--links", doctor.links,
                       "started as training is, on every rank: file for the times of collectives between them")
          ->check(not_empty());
  command->add_option("--transport", doctor.transport, "of --links: host, gloo or mpi; default: the best there is")
      ->check(CLI::IsMember({"host", "gloo", "mpi"}))
      ->needs(links);
  command->add_flag("--overwrite", doctor.overwrite, "replace a file of --links that exists")->needs(links);
}

void add_bench(CLI::App& app, BenchCommand& bench) {
  CLI::App* command = add_command(app, "bench");
  command->require_subcommand(1);
  CLI::App* collectives = command->add_subcommand("collectives", "every collective, 4 B to 128 MiB");
  collectives->add_flag(
      "--fit", bench.fit,
      "time every algorithm over gloo or mpi instead, fit what rounds, messages, bytes and additions cost, "
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
  CLI::App* codecs = command->add_subcommand("codecs", "int8, int4 and signs of the wire, by one thread");
  codecs->add_flag("--gpu", bench.gpu, "by the GPU's kernels");
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
  CLI::App* times = command->add_subcommand("times", "what telling where the time goes costs a steady step");
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
  for (CLI::App* each : {collectives, checkpoint, buckets, step, memory, overhead, times, overlap}) {
    each->add_option("-n,--ranks", bench.ranks, "ranks to start, where no launcher has")
        ->transform(integer_from(1, kMostLaunched))
        ->capture_default_str();
    each->add_option("--transport", bench.transport, "host, gloo or mpi; default: the best there is")
        ->check(CLI::IsMember({"host", "gloo", "mpi"}));
  }
  buckets->add_option("--csv", bench.csv, "file that gets the table")->check(not_empty());
  buckets->add_option("--cifar10", bench.cifar10, "folder of CIFAR-10's binary files; default: generated images")
      ->check(not_empty());
  for (CLI::App* each : {collectives, optimizer, codecs, offload, checkpoint, buckets, step, memory, overhead, times,
                         launches, overlap}) {
    each->add_option("--json", bench.json, "file that gets every sample")->check(not_empty());
    each->add_flag("--overwrite", bench.overwrite, "replace results that exist; otherwise they are kept, an error");
    each->add_flag("--quick", bench.quick, "small sizes, to see that it works");
  }
}

}  // namespace

int run_command_line(int argc, char** argv) {
  CommandLine line;
  BenchCommand bench;
  DoctorCommand doctor;
  add_bench(line.app, bench);
  add_doctor(line.app, doctor);
  if (const auto code = line.parse(argc, argv)) return *code;
  if (line.got("doctor")) return run_doctor(doctor);
  const std::pair<const char*, int (*)(const BenchCommand&)> sections[] = {
      {"collectives", run_bench_collectives}, {"optimizer", run_bench_optimizer}, {"offload", run_bench_offload},
      {"buckets", run_bench_buckets},         {"step", run_bench_step},           {"memory", run_bench_memory},
      {"checkpoint", run_bench_checkpoint},   {"overhead", run_bench_overhead},   {"overlap", run_bench_overlap},
      {"launches", run_bench_launches},       {"times", run_bench_times},         {"codecs", run_bench_codecs}};
  for (const auto& [name, run_section] : sections) {
    if (line.got("bench", name)) return run_section(bench);
  }
  return static_cast<int>(ExitCode::kUsage);
}

}  // namespace tessera::app
