#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/job/join_job.h"
#include "planner/measured/link_fit_file.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/text_table.h"
#include "runtime/border/throw.h"
#include "runtime/comm/job/process_mesh.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/transport_rows.h"
#include "tessera/run.h"
#include "workshop/app/bench/bench_ranks.h"
#include "workshop/app/commands.h"
#include "workshop/app/threads.h"
#include "workshop/bench/algorithms_bench.h"
#include "workshop/bench/codec_speed.h"
#include "workshop/bench/collectives_bench.h"
#include "workshop/bench/number_text.h"
#include "workshop/bench/offload_bench.h"
#include "workshop/bench/optimizer_bench.h"
#include "workshop/bench/studies/step_study.h"
#include "workshop/bench/studies/studies.h"

namespace tessera::app {
namespace {
std::string microseconds(double seconds) { return number_text(seconds * 1e6, "%.2f"); }

// This file has the sections of `tessera bench`, except `buckets` and the sections that are programs of their own.
//
// Each `run_bench_...` checks its output files, and starts ranks if it needs several and is alone (bench_ranks.h). Then
// it measures, writes the samples as JSON, and prints a table. `run_table` does this for sections whose result is a
// BenchTable. The other sections have one `table_of` for each kind of report.

void write_json(const nlohmann::json& json, const BenchCommand& command) {
  write_text(json.dump() + "\n", command.json, command);
}

std::string table_of(const CollectivesReport& report) {
  TextTable table({left_column("collective"), left_column("dtype"), left_column("memory"), right_column("bytes"),
                   right_column("p50 us"), right_column("p95 us"), right_column("p99 us"), right_column("GB/s"),
                   right_column("of limit")});
  for (const CollectiveTiming& timing : report.timings) {
    const bool has_limit = !timing.limit.empty();
    table.add_row({std::string(name_of(timing.what.operation)), std::string(name_of(timing.what.dtype)),
                   std::string(name_of(timing.what.memory)), format_bytes(static_cast<std::int64_t>(timing.what.bytes)),
                   microseconds(timing.call.median_s()), microseconds(timing.call.quantile_s(0.95)),
                   microseconds(timing.call.quantile_s(0.99)), number_text(timing.gigabytes_per_s(), "%.2f"),
                   has_limit ? number_text(timing.of_limit(), "%.2f") : "-"});
  }
  return table.to_string();
}

std::string table_of(const std::vector<PassTiming>& timings) {
  TextTable table({left_column("pass"), right_column("elements"), right_column("bytes"), right_column("p50 ms"),
                   right_column("GB/s"), right_column("of limit")});
  for (const PassTiming& timing : timings) {
    const double median = timing.pass.median_s();
    table.add_row({timing.name, std::to_string(timing.numel), format_bytes(static_cast<std::int64_t>(timing.bytes)),
                   number_text(median * 1e3, "%.2f"),
                   number_text(static_cast<double>(timing.bytes) / median * 1e-9, "%.2f"),
                   number_text(timing.limit.median_s() / median, "%.2f")});
  }
  return table.to_string();
}

std::string gigabytes_per_s(double rate) { return number_text(rate * 1e-9, "%.2f"); }

std::string table_of(const OffloadReport& report) {
  TextTable disks({left_column("disk, passes"), right_column("GB/s"), right_column("p50 ms"),
                   right_column("CPU s a GiB"), left_column("by")});
  for (const DiskSpeed& disk : report.disks) {
    const auto add = [&](const char* name, const DiskPasses& passes, double rate, int ways) {
      const double gib = static_cast<double>(ways * disk.bytes) / static_cast<double>(1 << 30);
      disks.add_row({name, gigabytes_per_s(rate), number_text(passes.time.median_s() * 1e3, "%.1f"),
                     number_text(passes.cpu.median_s() / gib, "%.3f"), disk.engine});
    };
    add("write", disk.write, disk.write_bytes_per_s(), 1);
    add("read", disk.read, disk.read_bytes_per_s(), 1);
    add("read and write back", disk.mixed, disk.mixed_bytes_per_s(), 2);
  }
  TextTable steps({left_column("step, states on disk"), right_column("p50 ms"), right_column("in memory"),
                   right_column("disk alone"), right_column("moved"), right_column("records in memory"),
                   right_column("of limit")});
  for (const OffloadedStepTiming& step : report.steps) {
    steps.add_row({step.name, number_text(step.step.median_s() * 1e3, "%.1f"),
                   number_text(step.in_memory.median_s() * 1e3, "%.1f"),
                   number_text(step.transfer.median_s() * 1e3, "%.1f"), format_bytes(step.bytes_moved),
                   format_bytes(static_cast<std::int64_t>(step.memory_bytes)), number_text(step.of_limit(), "%.2f")});
  }
  return disks.to_string() + "\n" + steps.to_string();
}

CollectivesBenchOptions options_of(const BenchCommand& command) {
  CollectivesBenchOptions options;
  const std::size_t most = command.quick ? std::size_t{1} << 20 : std::size_t{128} << 20;
  for (std::size_t bytes = 4; bytes < most; bytes *= bytes < 4096 ? 16 : 4) options.bytes.push_back(bytes);
  options.bytes.push_back(most);
  if (command.quick) options.rounds = 3;
  if (command.quick) options.most_calls = 50;
  return options;
}

/// Runs a section whose result is a table about Engines on several ranks.
int run_table(const std::string& section, const BenchCommand& command,
              const std::function<BenchTable(const Mesh&)>& study) {
  if (starts_ranks(command)) return launch_ranks(section, command);
  set_log_quiet();  // each row makes an Engine, which would print its plan
  return run([&] {
    const Mesh mesh = join_ranks(command);
    if (mesh.world_size() < 2) {
      throw Error(ExitCode::kUsage,
                  "bench " + section + " wants 2 ranks or more, got 1. [T0003] hint: leave --ranks out");
    }
    if (mesh.rank() == 0) check_outputs(command);
    set_threads_of_rank(mesh.topology().local_world_size);
    const BenchTable table = study(mesh);
    if (mesh.rank() != 0) return;
    write_json(to_json(table), command);
    std::printf("%d ranks\n%s", mesh.world_size(), to_text(table).c_str());
  });
}

std::string table_of(const AlgorithmsReport& report) {
  TextTable table({left_column("collective"), left_column("dtype"), right_column("bytes of a rank"),
                   left_column("algorithm"), right_column("p50 us"), right_column("by the fit"), left_column("")});
  for (const TimedAlgorithm& timing : report.timings) {
    const std::string note = std::string(timing.is_chosen ? "chosen" : "") +
                             (timing.is_chosen && timing.is_fastest ? ", " : "") + (timing.is_fastest ? "fastest" : "");
    table.add_row({std::string(name_of(timing.call.operation)), std::string(name_of(timing.call.dtype)),
                   format_bytes(static_cast<std::int64_t>(timing.call.bytes)),
                   std::string(name_of(timing.call.algorithm)), microseconds(timing.call.median_s()),
                   microseconds(timing.by_fit_s), note});
  }
  return table.to_string();
}

/// Returns a text with the fitted costs, and with the quality of the choices that follow from these costs.
std::string text_of(const AlgorithmsReport& report) {
  std::vector<double> ratios = report.chosen_of_fastest();
  std::sort(ratios.begin(), ratios.end());
  const auto right = std::count(ratios.begin(), ratios.end(), 1.0);
  return text_of(report.fit) + "\nthe choice is the fastest in " + std::to_string(right) + " of " +
         std::to_string(ratios.size()) + "; it takes " + number_text(ratios[ratios.size() / 2], "%.2f") +
         " times as long by median, " + number_text(ratios.back(), "%.2f") + " at most\n";
}

int run_bench_algorithms(const BenchCommand& command) {
  return run([&] {
    std::atomic<Algorithm> now = Algorithm::kDirect;
    const CommConfig comm{.transport =
                              command.transport.empty() ? TransportChoice::kGloo : transport_named(command.transport)};
    const Mesh mesh = join_job([&](const Topology& topology) {
      return make_process_mesh(topology, comm, [&now](Operation, int, DType, std::size_t) { return now.load(); });
    });
    if (mesh.world_size() < 2)
      throw Error(ExitCode::kUsage,
                  "bench collectives --fit wants 2 ranks or more, got 1. [T0004] hint: leave --ranks out");
    if (mesh.rank() == 0) check_outputs(command);
    const MeshAxes axes = value_or_throw(groups_of(mesh).axes(1, mesh.world_size()));
    AlgorithmsBenchOptions options;
    const std::size_t most = command.quick ? 64 << 10 : 16 << 20;
    for (std::size_t bytes = 64; bytes <= most; bytes *= bytes < 1024 ? 16 : 8) options.bytes.push_back(bytes);
    if (command.quick) options.rounds = 2, options.most_calls = 5;
    const AlgorithmsReport report = value_or_throw(bench_algorithms(
        *axes.world, [&](Algorithm algorithm) { now = algorithm; }, options));
    if (mesh.rank() != 0) return;
    write_json(to_json(report), command);
    write_text(to_json(report.fit), command.fit_file, command);
    std::printf("%s, %d ranks\n%s%s", report.transport.c_str(), report.ranks, table_of(report).c_str(),
                text_of(report).c_str());
  });
}

InstructionSet instruction_set_of(const std::string& name) {
  if (name.empty()) return best_instruction_set();
  for (const InstructionSet set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (name_of(set) != name) continue;
    if (supports(set)) return set;
    throw Error(ExitCode::kUnavailable,
                "--isa " + name +
                    ": this processor does not have it. [T0005] hint: leave it out for the best it has, " +
                    std::string(name_of(best_instruction_set())));
  }
  throw Error(ExitCode::kUsage, "--isa: \"" + name + "\" is unknown. [T0006] hint: give portable, avx2 or avx512");
}

}  // namespace

int run_bench_collectives(const BenchCommand& command) {
  if (command.fit && command.transport == "host")
    throw Error(ExitCode::kUsage,
                "bench collectives: --fit is about gloo, got --transport host. [T0007] hint: give --transport gloo");
  if (starts_ranks(command)) return launch_ranks("collectives", command);
  if (command.fit) return run_bench_algorithms(command);
  return run([&] {
    const Mesh mesh = join_ranks(command);
    if (mesh.rank() == 0) check_outputs(command);
    const CollectivesReport report = value_or_throw(bench_collectives(mesh, options_of(command)));
    if (mesh.rank() != 0) return;
    write_json(to_json(report), command);
    std::printf("%s, %d ranks\n%s", report.transport.c_str(), report.ranks, table_of(report).c_str());
  });
}

int run_bench_optimizer(const BenchCommand& command) {
  return run([&] {
    check_outputs(command);
    // The usual number on a CPU is no power of two: a CPU is slow if arrays begin exactly 128 MiB apart (state_piece).
    const std::int64_t usual = command.quick ? 1'000'000 : command.gpu ? std::int64_t{1} << 30 : 32'000'000;
    const auto numel = static_cast<std::size_t>(command.parameters > 0 ? command.parameters : usual);
    const int rounds = command.quick ? 3 : 9;
    const InstructionSet set = instruction_set_of(command.isa);
    const auto timings =
        command.gpu ? value_or_throw(bench_device_optimizer(numel, rounds)) : bench_optimizer(numel, rounds, set);
    write_json(to_json(timings), command);
    std::printf("%s; the mixed steps take the gradient's norm first\n%s",
                command.gpu ? "GPU" : ("one thread, " + std::string(name_of(set))).c_str(), table_of(timings).c_str());
  });
}

int run_bench_codecs(const BenchCommand& command) {
  return run([&] {
    check_outputs(command);
    const std::size_t numel = command.quick ? 1'000'000 : command.gpu ? std::size_t{1} << 28 : 32'000'000;
    const int rounds = command.quick ? 3 : 9;
    const auto timings = command.gpu ? value_or_throw(bench_device_codecs(numel, rounds)) : bench_codecs(numel, rounds);
    write_json(to_json(timings), command);
    std::printf("%s\n%s", command.gpu ? "GPU" : "one thread", table_of(timings).c_str());
  });
}

int run_bench_offload(const BenchCommand& command) {
  return run([&] {
    check_outputs(command);
    OffloadBenchOptions options{.directory = command.directory,
                                .bytes = command.disk_bytes,
                                .record_bytes = static_cast<std::size_t>(command.record_bytes),
                                .queue_depth = static_cast<int>(command.queue_depth),
                                .cache_bytes = command.cache_bytes};
    if (command.quick) {
      options.bytes = std::min<std::int64_t>(options.bytes, 64 << 20);
      options.numel = std::size_t{2} << 20;
      options.record_bytes = std::min<std::size_t>(options.record_bytes, 1 << 20);
      options.rounds = 2;
    }
    if (options.cache_bytes > 0 && options.cache_bytes < static_cast<std::int64_t>(options.record_bytes)) {
      throw Error(ExitCode::kUsage, "bench offload: --cache " + format_bytes(options.cache_bytes) +
                                        " has no room for a record of " +
                                        format_bytes(static_cast<std::int64_t>(options.record_bytes)) +
                                        ". [T0008] hint: give --cache at least that, or leave it out");
    }
    const OffloadReport report = value_or_throw(bench_offload(options));
    write_json(to_json(report), command);
    std::printf("%s, %s; one thread\n%s", command.directory.c_str(), report.disks.front().file_mode.c_str(),
                table_of(report).c_str());
  });
}

int run_bench_step(const BenchCommand& command) {
  return run_table("step", command, [&](const Mesh& mesh) {
    StepStudyOptions options{.model = studied_gpt(command.quick)};
    if (command.quick) options.rounds = options.warm_up = 1, options.steps = 3;
    return to_table(study_steps(mesh, options));
  });
}

int run_bench_memory(const BenchCommand& command) {
  return run_table("memory", command, [&](const Mesh& mesh) { return study_memory(mesh, studied_gpt(command.quick)); });
}

int run_bench_checkpoint(const BenchCommand& command) {
  return run_table("checkpoint", command, [&](const Mesh& mesh) {
    CheckpointStudyOptions options{.folder = command.directory};
    if (command.quick) options.parameters = 1'000'000, options.rounds = 2;
    return study_checkpoints(mesh, options);
  });
}

int run_bench_overhead(const BenchCommand& command) {
  return run_table("overhead", command, [&](const Mesh& mesh) {
    return command.quick ? study_overhead(mesh, 5, 200) : study_overhead(mesh, 101, 2000);
  });
}

int run_bench_times(const BenchCommand& command) {
  return run_table("times", command, [&](const Mesh& mesh) {
    return study_times(mesh, times_cases(command.quick), command.quick ? 2 : 9);
  });
}

int run_bench_launches(const BenchCommand& command) {
  set_log_quiet();
  return run([&] {
    check_outputs(command);
    LaunchStudyOptions options{.on_gpu = command.gpu};
    if (command.quick) options = {.on_gpu = command.gpu, .blocks = 2, .rounds = 2, .warm_up = 1, .steps = 2};
    const BenchTable table = study_launches(options);
    write_json(to_json(table), command);
    std::printf("%s\n%s", command.gpu ? "GPU" : "CPU, where the figures mean nothing", to_text(table).c_str());
  });
}

int run_bench_overlap(const BenchCommand& command) {
  return run_table("overlap", command, [&](const Mesh& mesh) {
    OverlapStudyOptions options{
        .units = command.units, .unit_numel = (24 << 20) / command.units, .compute_s = command.compute_s};
    if (command.quick) options = {.units = 3, .unit_numel = 1 << 12, .compute_s = 0.01, .rounds = 1};
    return study_overlap(mesh, options);
  });
}

}  // namespace tessera::app
