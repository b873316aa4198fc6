#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "workshop/bench/bench_table.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

struct CheckpointStudyOptions {
  std::filesystem::path folder;          ///< the study makes a subfolder, and removes it at the end
  std::int64_t parameters = 64'000'000;  ///< approximate number, with AdamW: 12 bytes each in a checkpoint
  int rounds = 5;
};

/// Measures a save and a load of a checkpoint, and the time that this machine needs for the same number of bytes: a
/// copy in memory, and a plain file that is written and synced, by all ranks at once. A save beside training
/// ("checkpoint.async") is timed twice: the time for which training waits, and the time until it is committed while
/// nothing else runs. A checkpoint is loaded twice: right after a save, and then from the page cache. A commit
/// ("durable") is compared with a file of as many bytes that is overwritten past the page cache. All these measurements
/// take turns in each round. The call is collective, and the figures are those of rank 0.
BenchTable study_checkpoints(const Mesh& mesh, const CheckpointStudyOptions& options);

/// Options of study_launches.
struct LaunchStudyOptions {
  bool on_gpu = true;        ///< false: the study runs on the CPU, where the figures mean nothing
  std::int64_t blocks = 48;  ///< number of units, besides the root
  int rounds = 80;           ///< number of rounds; every contender has a turn in each
  int warm_up = 10;          ///< steps of each contender before the first round
  /// Steps of a turn, which is one sample. The steps are few, so that a load on the machine slows all contenders alike.
  int steps = 2;
};

/// Measures the time that Tessera costs the host that feeds a GPU, on a single rank. The study times steps of a narrow
/// GPT in bf16, for which the GPU waits for the host. "plain module" is LibTorch without an Engine: the module in bf16,
/// fp32 masters beside it, one fused AdamW over all of them. over_plain_s says how much longer a step takes than a step
/// of the plain module in the same round (median over rounds). over_plain_unit_s is the same time divided by the number
/// of units, and has quantiles too. The function restores LibTorch's number of threads.
BenchTable study_launches(const LaunchStudyOptions& options);

/// Returns a row for every strategy: the plan of one rank, what its Engine allocated, and what the kernel charges the
/// process for the Engine. The charge is the one between two steps, when no activation has memory, minus the charge
/// before the model was made. The charge counts anonymous memory, and the process's share of memory that ranks map
/// together (proc_pid_smaps(5)). ZeRO's formula (arXiv 1910.02054, figure 1) for P fp32 parameters on N ranks is in the
/// same row: 16P, 8P + 8P/N, 4P + 12P/N, 16P/N bytes. The call is collective, and the figures are those of rank 0.
BenchTable study_memory(const Mesh& mesh, const models::GPTConfig& config);

/// Measures the time that Tessera costs the host for each operator. The operators are additions of 8 numbers, where
/// nothing else takes time. They run with and without an Engine that watches operators, and with and without one of its
/// parameters among the inputs. The study then measures the cost of a unit that is gathered for every operator. Such a
/// gather consists of two small collectives with the transport `host`. Two pairs of rows are for steps of a small GPT:
/// the checks of the program, and the update with one group of parameters or many. The last rows are whole steps of
/// 4000 such units (200 where `operators` is below 1000), with several numbers of units gathered ahead. The call is
/// collective, and the figures are those of rank 0. `operators` is the number of operators in a sample.
BenchTable study_overhead(const Mesh& mesh, int rounds, int operators);

/// Options of study_overlap.
struct OverlapStudyOptions {
  int units = 8;
  std::int64_t unit_numel = 3 << 20;  ///< fp32 parameters of a unit
  double compute_s = 0.6;  ///< computation in a step: a third in forward, two thirds in backward, equal for all units
  int rounds = 7;
};

/// Measures how much of a step's communication is hidden behind computation that is a timed sleep, so that processors
/// are free for the transport. For each strategy, four kinds of steps take turns: steps with and without compute on all
/// ranks, and the same two kinds on this rank alone (NO_SHARD). There is a row for each strategy:
///
///   wire_s      communication with nothing to hide it: a step without compute, less such a step of a rank alone
///   exposed_s   communication that is not hidden: a step with compute, less such a step of a rank alone
///
/// The row also has the medians of the steps themselves. The call is collective, and the figures are those of rank 0.
BenchTable study_overlap(const Mesh& mesh, const OverlapStudyOptions& options);

/// A model that study_times trains, with one sequence a rank.
struct TimesCase {
  std::string name;
  models::GPTConfig model;
  int steps = 10;  ///< steps of a turn that are counted
};
/// Returns 24 layers of width 64, with short steps, and a GPT of 69 million parameters. If `small` is true, returns two
/// layers of width 64.
std::vector<TimesCase> times_cases(bool small);

/// Measures the cost of timing for a steady step, under FULL_SHARD with one copy of the parameters on a host, and with
/// private copies. These kinds of steps take turns in every round:
///
///   nothing told            no latencies, and no listener for ranges; the wait for data is not measured, except with
///                           private copies, whose operators are watched in any case
///   nothing told, another   the same with another Engine: shows how far two equal Engines differ
///   ranges                  each range asks whether a profiler is attached, and none is: every program has this cost
///   all                     ranges, the wait for data (Engine::time_data) and latencies (Engine::time_calls)
///   all, with a profiler    an observer of LibTorch is attached, which counts ranges
///
/// Floating-point operations are counted in an Engine's first step, which is never among those that are timed.
/// over_plain_fraction is the median over rounds of how much longer the step takes than the step of "nothing told" in
/// the same round. The call is collective; a step's time is that of the slowest rank.
BenchTable study_times(const Mesh& mesh, const std::vector<TimesCase>& cases, int rounds);

}  // namespace tessera::app
