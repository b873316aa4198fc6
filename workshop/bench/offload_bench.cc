#include "workshop/bench/offload_bench.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "offload/file_tier.h"
#include "offload/files/aligned_memory.h"
#include "optim/optimizer.h"
#include "runtime/base/status.h"
#include "sharding/layout/plan/record_layout.h"

namespace tessera {
namespace {

TieredState state_of(const OptimizerCase& what, std::size_t record_bytes) {
  return {.master_bytes = what.mixed() ? 2 : 0,
          .states = {what.state, what.state},
          .masters_below = 1,
          .states_below = 1,
          .record_bytes = static_cast<std::int64_t>(record_bytes)};
}

/// A step with parameters and gradients in memory, and states in records. Steps go forward and backward in turn, as the
/// Engine's steps do, and follow each other as in training. The last writes of one pass continue while the next pass
/// begins, and only the very last writes are waited for.
class OffloadedStep {
 public:
  static constexpr int kInARow = 3;

  static absl::StatusOr<std::unique_ptr<OffloadedStep>> make(const OptimizerCase& what,
                                                             const OffloadBenchOptions& options,
                                                             std::int64_t cache_bytes) {
    std::unique_ptr<OffloadedStep> step(new OffloadedStep(what, options));
    TESSERA_RETURN_IF_ERROR(step->take_memory(options, static_cast<std::size_t>(cache_bytes)));
    return step;
  }

  /// Makes kInARow steps, each of which visits every record.
  absl::Status steps() {
    for (int i = 0; i < kInARow; ++i) {
      ++steps_;
      TESSERA_RETURN_IF_ERROR(pass([&](std::int64_t chunk, std::byte* record) { update(chunk, record); }));
    }
    return tier_->flush();
  }
  absl::Status transfers() {
    for (int i = 0; i < kInARow; ++i) TESSERA_RETURN_IF_ERROR(pass([](std::int64_t, std::byte*) {}));
    return tier_->flush();
  }
  absl::Status in_memory() {
    for (int i = 0; i < kInARow; ++i) {
      ++steps_;
      for (std::int64_t chunk = 0; chunk < layout_.chunks(); ++chunk)
        update(chunk, states_.data() + chunk * layout_.record(0).bytes);
    }
    return absl::OkStatus();
  }

  std::size_t memory_bytes() const { return tier_->record_memory_bytes(); }
  std::int64_t bytes_moved() const { return tier_->counters().bytes_read + tier_->counters().bytes_written; }

 private:
  OffloadedStep(const OptimizerCase& what, const OffloadBenchOptions& options)
      : what_(what),
        depth_(options.queue_depth),
        layout_(round_up(options.numel, state_of(what, options.record_bytes)), state_of(what, options.record_bytes)) {
    OptimizerConfig config;
    config.state_dtype = what.state;
    optimizer_ = make_optimizer(config);
  }

  static std::int64_t round_up(std::size_t numel, const TieredState& state) {
    const std::int64_t chunk = RecordLayout(1, state).chunk_numel();
    return (static_cast<std::int64_t>(numel) + chunk - 1) / chunk * chunk;
  }

  absl::Status take_memory(const OffloadBenchOptions& options, std::size_t cache_bytes) {
    const auto numel = static_cast<std::size_t>(layout_.numel());
    const auto record_bytes = static_cast<std::size_t>(layout_.record(0).bytes);
    TESSERA_ASSIGN_OR_RETURN(gradient_, AlignedMemory::make(numel * 4, "bench offload"));
    TESSERA_ASSIGN_OR_RETURN(parameters_, AlignedMemory::make(numel * (what_.mixed() ? 2 : 4), "bench offload"));
    TESSERA_ASSIGN_OR_RETURN(
        states_, AlignedMemory::make(record_bytes * static_cast<std::size_t>(layout_.chunks()), "bench offload"));
    float value = 1e-3f;
    for (float& g : std::span(reinterpret_cast<float*>(gradient_.data()), numel)) g = (value = -value);
    FileTierOptions tier;
    tier.records = layout_.chunks();
    tier.record_bytes = record_bytes;
    tier.who = "bench offload";
    tier.paths = {{options.directory}};
    tier.read_ahead = tier.write_behind = depth_;
    tier.resident_bytes = cache_bytes;
    TESSERA_ASSIGN_OR_RETURN(tier_, FileTier::create(tier));
    return absl::OkStatus();
  }

  template <class Body>
  absl::Status pass(const Body& body) {
    const std::int64_t count = layout_.chunks();
    const auto chunk_at = [&](std::int64_t i) { return forward_ ? i : count - 1 - i; };
    std::int64_t fetched = 0;
    const auto fetch_ahead = [&] {
      while (fetched < count && tier_->fetch(chunk_at(fetched))) ++fetched;
    };
    fetch_ahead();
    for (std::int64_t i = 0; i < count; ++i) {
      TESSERA_ASSIGN_OR_RETURN(const std::span<std::byte> record, tier_->get(chunk_at(i)));
      fetched = std::max(fetched, i + 1);
      fetch_ahead();
      body(chunk_at(i), record.data());
      TESSERA_RETURN_IF_ERROR(tier_->put(chunk_at(i)));
    }
    forward_ = !forward_;
    return absl::OkStatus();
  }

  void update(std::int64_t chunk, std::byte* bytes) {
    const Extent run = layout_.chunk(chunk);
    const RecordLayout::Record record = layout_.record(chunk);
    const auto numel = static_cast<std::size_t>(run.numel);
    OptimizerSlice slice;
    slice.gradient = {reinterpret_cast<const float*>(gradient_.data()) + run.offset, numel};
    if (what_.mixed()) {
      slice.master_kind = MasterKind::kSplitBF16;
      slice.parameter_dtype = DType::kBF16;
      slice.parameter = parameters_.data() + run.offset * 2;
      slice.low = {reinterpret_cast<std::int16_t*>(bytes + record.masters.offset), numel};
    } else {
      slice.master = {reinterpret_cast<float*>(parameters_.data()) + run.offset, numel};
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const RecordLayout::Record::State& piece = record.states[i];
      slice.states[i].data = {bytes + piece.numbers.offset, static_cast<std::size_t>(piece.numbers.bytes)};
      slice.states[i].scales = {reinterpret_cast<float*>(bytes + piece.scales.offset),
                                static_cast<std::size_t>(piece.scales.bytes / 4)};
    }
    slice.first_element = static_cast<std::uint64_t>(run.offset);
    optimizer_->step({.gradient_scale = 1.0f, .lr = 1e-3f, .step = steps_}, slice);
  }

  const OptimizerCase what_;
  const int depth_;
  const RecordLayout layout_;
  std::unique_ptr<Optimizer> optimizer_;
  AlignedMemory gradient_, parameters_;
  AlignedMemory states_;  ///< states of the step in memory
  std::unique_ptr<FileTier> tier_;
  bool forward_ = true;
  std::int64_t steps_ = 0;
};

/// Adds the mean time of the steps that `body` makes.
template <class Body>
absl::Status time(Samples& samples, bool counts, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  TESSERA_RETURN_IF_ERROR(body());
  const auto time = (std::chrono::steady_clock::now() - start) / OffloadedStep::kInARow;
  if (counts) samples.ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
  return absl::OkStatus();
}

absl::StatusOr<OffloadedStepTiming> bench_step(const OptimizerCase& what, const OffloadBenchOptions& options,
                                               std::int64_t cache_bytes) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<OffloadedStep> subject,
                           OffloadedStep::make(what, options, cache_bytes));
  OffloadedStepTiming timing;
  timing.name = std::string(what.name) + (cache_bytes > 0 ? " cached" : "");
  timing.memory_bytes = subject->memory_bytes();
  timing.numel = options.numel;
  for (int round = -2; round < options.rounds; ++round) {  // the first two rounds write the data that later rounds read
    const bool counts = round >= 0;
    const std::int64_t before = subject->bytes_moved();
    TESSERA_RETURN_IF_ERROR(time(timing.step, counts, [&] { return subject->steps(); }));
    timing.bytes_moved = (subject->bytes_moved() - before) / OffloadedStep::kInARow;
    TESSERA_RETURN_IF_ERROR(time(timing.transfer, counts, [&] { return subject->transfers(); }));
    TESSERA_RETURN_IF_ERROR(time(timing.in_memory, counts, [&] { return subject->in_memory(); }));
  }
  return timing;
}

std::vector<double> seconds(const Samples& samples) {
  std::vector<double> all;
  for (const std::int64_t ns : samples.ns) all.push_back(static_cast<double>(ns) * 1e-9);
  return all;
}

nlohmann::json to_json(const DiskPasses& passes) {
  return {{"samples_s", seconds(passes.time)}, {"cpu_s", seconds(passes.cpu)}};
}

}  // namespace

double OffloadedStepTiming::of_limit() const {
  return std::max(in_memory.median_s(), transfer.median_s()) / step.median_s();
}

absl::StatusOr<OffloadReport> bench_offload(const OffloadBenchOptions& options) {
  OffloadReport report;
  for (const IoEngine engine : {IoEngine::kBest, IoEngine::kThreads}) {
    TESSERA_ASSIGN_OR_RETURN(DiskSpeed speed, measure_disk({.directory = options.directory,
                                                            .bytes = options.bytes,
                                                            .record_bytes = options.record_bytes,
                                                            .in_flight = 2 * options.queue_depth,
                                                            .rounds = std::min(options.rounds, 3),
                                                            .engine = engine}));
    report.disks.push_back(std::move(speed));
  }
  std::vector<std::int64_t> caches = {0};
  if (options.cache_bytes > 0) caches.push_back(options.cache_bytes);
  for (const OptimizerCase& what : kOptimizerCases) {
    for (const std::int64_t cache_bytes : caches) {
      TESSERA_ASSIGN_OR_RETURN(OffloadedStepTiming timing, bench_step(what, options, cache_bytes));
      report.steps.push_back(std::move(timing));
    }
  }
  return report;
}

nlohmann::json to_json(const OffloadReport& report) {
  nlohmann::json disks = nlohmann::json::array(), steps = nlohmann::json::array();
  for (const DiskSpeed& disk : report.disks) {
    disks.push_back({{"bytes", disk.bytes},
                     {"file", disk.file_mode},
                     {"engine", disk.engine},
                     {"write", to_json(disk.write)},
                     {"read", to_json(disk.read)},
                     {"mixed", to_json(disk.mixed)}});
  }
  for (const OffloadedStepTiming& step : report.steps) {
    steps.push_back({{"name", step.name},
                     {"numel", step.numel},
                     {"bytes_moved", step.bytes_moved},
                     {"memory_bytes", step.memory_bytes},
                     {"step_s", seconds(step.step)},
                     {"in_memory_s", seconds(step.in_memory)},
                     {"transfer_s", seconds(step.transfer)},
                     {"of_limit", step.of_limit()}});
  }
  return {{"disks", disks}, {"steps", steps}};
}

}  // namespace tessera
