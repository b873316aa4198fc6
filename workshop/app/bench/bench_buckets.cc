#include <cstdio>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "tessera/run.h"
#include "workshop/app/bench/bench_ranks.h"
#include "workshop/app/commands.h"
#include "workshop/app/threads.h"
#include "workshop/bench/studies/bucket_study.h"

namespace tessera::app {
namespace {

BucketStudyOptions bucket_options_of(const BenchCommand& command) {
  BucketStudyOptions options;
  options.images.cifar10 = command.cifar10;
  const std::int64_t most = std::int64_t{1} << (command.quick ? 20 : 26);
  for (std::int64_t bytes = 1 << 10; bytes <= most; bytes *= 4) options.reduction_bytes.push_back(bytes);
  if (!command.quick) return options;
  options.rounds = 1;
  options.warm_up_steps = 1;
  options.timed_steps = 3;
  options.most_reductions = 5;
  options.held_out_batches = 5;
  options.small_models = true;
  return options;
}

}  // namespace

int run_bench_buckets(const BenchCommand& command) {
  if (starts_ranks(command)) return launch_ranks("buckets", command);
  set_log_quiet();  // each bucket and round has an Engine, which would print its plan
  return run([&] {
    const Mesh mesh = join_ranks(command);
    if (mesh.world_size() < 2) {
      throw Error(ExitCode::kUsage,
                  "bench buckets measures reductions between ranks: want 2 ranks or more, got 1. [T0009] hint: "
                  "leave --ranks out");
    }
    if (mesh.rank() == 0) check_outputs(command);
    set_threads_of_rank(mesh.topology().local_world_size);
    const BucketReport report = study_buckets(mesh, bucket_options_of(command));
    if (mesh.rank() != 0) return;
    write_text(to_json(report).dump() + "\n", command.json, command);
    write_text(to_csv(report), command.csv, command);
    if (command.quick) std::fputs("a smoke test: its figures mean nothing\n", stdout);
    std::fputs(to_text(report).c_str(), stdout);
  });
}

}  // namespace tessera::app
