#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "device_runs.h"
#include "tests/support/offloaded.h"
#include "tests/support/session.h"

namespace tessera::testing {

/// The tiers on which a GPU's parameters, masters and states lie.
struct Lying {
  OffloadedState parameters, states;
  std::int64_t record_bytes = 4096, queue_depth = 1, cache_bytes = 0;
  OffloadedStep step = OffloadedStep::kGpu;
  bool is_in_files() const { return parameters.tier == Tier::kNvme || states.tier == Tier::kNvme; }
  bool is_by_cpu() const { return step == OffloadedStep::kCpu; }
};
inline constexpr OffloadedState kInDevice{};
inline constexpr Lying kHostAlone{{Tier::kHost, 1}, kInDevice}, kHostInPart{{Tier::kHost, 0.5}, kInDevice, 8192},
    kHostAll{{Tier::kHost, 1}, {Tier::kHost, 1}}, kHostMixed{{Tier::kHost, 0.4}, {Tier::kHost, 0.7}, 8192, 2},
    kByCpu{{Tier::kHost, 1}, {Tier::kHost, 1}, 4096, 1, 0, OffloadedStep::kCpu},
    kSomeByCpu{{Tier::kHost, 0.7}, {Tier::kHost, 0.4}, 8192, 1, 0, OffloadedStep::kCpu},
    kHostOverFiles{{Tier::kHost, 1}, {Tier::kNvme, 0.6}, 4096, 2}, kFilesAlone{{Tier::kNvme, 1}, kInDevice},
    kFilesInPart{{Tier::kNvme, 0.7}, kInDevice, 4096, 2, 4096}, kFilesAll{{Tier::kNvme, 1}, {Tier::kNvme, 1}, 4096, 2},
    kFilesOverHost{{Tier::kNvme, 1}, {Tier::kHost, 1}, 8192};
inline constexpr Lying kLying[] = {kHostAlone,     kHostInPart, kHostAll,     kHostMixed, kByCpu,        kSomeByCpu,
                                   kHostOverFiles, kFilesAlone, kFilesInPart, kFilesAll,  kFilesOverHost};

inline std::string name_of(const Lying& lying) {
  const auto text = [](const OffloadedState& state) {
    const std::string tier = state.tier == Tier::kMemory ? "memory" : state.tier == Tier::kHost ? "host" : "nvme";
    return tier + " " + std::to_string(state.fraction);
  };
  return "parameters " + text(lying.parameters) + ", states " + text(lying.states) +
         (lying.is_by_cpu() ? ", by the CPU" : "");
}

inline Strategy below(Strategy strategy, const Lying& lying) {
  OffloadConfig& offload = strategy.offload;
  offload.parameters = lying.parameters;
  offload.moments = lying.states;
  if (strategy.mixed_precision.param != DType::kF32) offload.masters = lying.states;
  offload.record_bytes = lying.record_bytes;
  offload.cache_bytes = lying.cache_bytes;
  const bool stays = lying.parameters.tier == Tier::kHost && (lying.states.tier == Tier::kMemory || lying.is_by_cpu());
  if (!stays) offload.queue_depth = lying.queue_depth;
  if (lying.states.tier == Tier::kHost) offload.step = lying.step;
  if (lying.is_in_files()) offload.paths = {std::filesystem::temp_directory_path().string()};
  return strategy;
}

/// Trains some steps, and expects the plan's traffic with files, to the GPU and to its host, and the plan's memory.
inline void expect_planned_traffic(Session& session, const Lying& lying, const std::string& what) {
  const PlannedMemory plan = session.engine.plan();
  if (lying.is_in_files()) {
    expect_planned_disk_traffic(session, what);
  } else {
    EXPECT_EQ(plan.disk, DiskUse{}) << what;
    session.train(0);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const TrafficCounts before = session.engine.traffic();
    session.train(i);
    const TrafficCounts after = session.engine.traffic();
    EXPECT_EQ(after.uploaded_bytes - before.uploaded_bytes, plan.uploaded_bytes) << what;
    EXPECT_EQ(after.streamed_bytes - before.streamed_bytes, plan.streamed_bytes) << what;
    EXPECT_EQ(after.host_step.to_host - before.host_step.to_host, plan.host_step.to_host) << what;
    EXPECT_EQ(after.host_step.to_gpu - before.host_step.to_gpu, plan.host_step.to_gpu) << what;
  }
  EXPECT_EQ(plan.use, session.engine.allocated()) << what;
}

/// Returns a run whose groups have several records each.
inline TrainOptions run_of(const TinyOptions& model) {
  TrainOptions options = short_run();
  options.model = model;
  options.model.blocks = 2;
  options.steps = 6;
  return options;
}

}  // namespace tessera::testing
