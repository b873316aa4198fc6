#include "workshop/app/train/durable_steps.h"

#include <chrono>
#include <cstdio>

#include "checkpoint/commit_log.h"
#include "engine/engine_checkpoints.h"
#include "tessera/durable.h"
#include "tessera/error.h"

namespace tessera::app {

bool goes_on_durably(const Strategy& strategy, const CheckpointOptions& options, int rank) {
  if (strategy.durable.every == 0 || options.resume != "auto") return false;
  const std::string& dir = strategy.durable.dir;
  // A run with more ranks than before has ranks that never had the folder open.
  return CommitLog::was_opened(dir, rank) || CommitLog::was_opened(dir, 0);
}

std::optional<LoadedCheckpoint> resume_durable_steps(const CheckpointOptions& options, Engine& engine,
                                                     TokenBatches& batches, bool speaks) {
  if (engine.strategy().durable.every == 0) return std::nullopt;
  if (options.resume != "auto") {
    const std::optional<std::int64_t> step = EngineCheckpoints(engine).commit_to_resume();
    if (!step) return std::nullopt;
    throw Error(ExitCode::kUsage, "train: --resume " + options.resume + ", but durable.dir " +
                                      engine.strategy().durable.dir + " holds step " + std::to_string(*step) +
                                      " of an earlier run. [T0015] hint: take --resume auto; or name another folder, "
                                      "or remove this one on every host");
  }
  const auto start = std::chrono::steady_clock::now();
  std::optional<LoadedCheckpoint> resumed = resume_durable(engine);
  if (!resumed) return std::nullopt;
  if (!resumed->items.data)
    throw Error(ExitCode::kCorruptData,
                "durable.dir " + resumed->path +
                    " does not say at which sample the data goes on. [T0016] hint: another program "
                    "wrote it: go on with that one, or name another folder");
  batches.resume(*resumed->items.data);
  if (speaks) {
    std::printf("resumes %s after step %lld (%.3f s)\n", resumed->path.c_str(), static_cast<long long>(resumed->step),
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  return resumed;
}

void commit_durable_step(Engine& engine, const CheckpointItems& items, bool is_last) {
  if (engine.strategy().durable.every == 0) return;
  commit_durable(engine, items);
  if (is_last) finish_commit(engine);
}

}  // namespace tessera::app
