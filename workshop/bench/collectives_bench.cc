#include "workshop/bench/collectives_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/local/plain_buffer.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/rounds/timed_calls.h"
#include "workshop/bench/memory_traffic.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// This file times collectives.
//
// A Bench is one case on one rank. It fills the input, makes the call, checks the result element by element, and
// computes the memory traffic that the call causes. `bench_collectives` first checks all cases, then goes through them
// in rounds. A load that slows the machine for a while therefore slows all cases alike. Each round times the call, and
// a loop that only causes the same memory traffic. A sample is the time of the slowest rank (`timing_of`).

constexpr std::size_t kInARow = 16 << 10;  // bytes up to which calls follow one another without a barrier

std::string text_of(const CollectiveCase& what) {
  return std::string(name_of(what.operation)) + " of " + std::to_string(what.bytes) + " bytes " +
         std::string(name_of(what.dtype)) + " in " + std::string(name_of(what.memory)) + " memory";
}

/// Input and output of one kind of memory, as large as the largest case needs.
struct Buffers {
  std::unique_ptr<CommBuffer> input, output;
};

/// Values are integers below 61, so sums of a few values are exact in every dtype and in any order.
float value_of(std::size_t i, int rank) { return static_cast<float>((7 * i + 3 * rank) % 61); }

void write_value(std::byte* data, DType dtype, std::size_t i, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto upper = static_cast<std::uint16_t>(bits >> 16);
  if (dtype == DType::kF32) std::memcpy(data + 4 * i, &bits, sizeof bits);
  if (dtype == DType::kBF16) std::memcpy(data + 2 * i, &upper, sizeof upper);
}

std::byte byte_of(std::size_t i, int rank) { return static_cast<std::byte>(13 * i + 101 * rank + i / 256); }

/// One case on one rank: its call, its expected result, and the memory traffic that it causes.
class Bench {
 public:
  Bench(Collectives& group, const CollectiveCase& what, const Buffers& buffers)
      : group_(group),
        what_(what),
        input_(buffers.input ? buffers.input->data() : nullptr),
        output_(buffers.output ? buffers.output->data() : nullptr),
        numel_(what.bytes / size_of(what.dtype)),
        part_(numel_ / group.size()) {}

  absl::Status call() {
    auto* sums = reinterpret_cast<float*>(output_);
    switch (what_.operation) {
      case Operation::kAllGather:
        return group_.all_gather("bench", output_ + group_.rank() * part_, output_, part_).wait();
      case Operation::kReduceScatter:
        return group_.reduce_scatter("bench", input_, what_.dtype, sums, part_).wait();
      case Operation::kAllReduce:
        return group_.all_reduce("bench", input_, what_.dtype, sums, numel_).wait();
      case Operation::kBroadcast:
        return group_.broadcast("bench", output_, what_.bytes, 0).wait();
      case Operation::kAllToAll:
        return group_.all_to_all("bench", input_, output_, part_).wait();
      default:
        return group_.barrier("bench").wait();
    }
  }

  absl::Status check() {
    fill();
    TESSERA_RETURN_IF_ERROR(group_.barrier("filled").wait());
    TESSERA_RETURN_IF_ERROR(call());
    if (right()) return absl::OkStatus();
    return make_error(ExitCode::kInternal, group_.transport() + " rank " + std::to_string(group_.rank()) +
                                               ": wrong result of " + text_of(what_));
  }

  /// Returns whether the case has a limit (CollectiveTiming::limit). A barrier and a case in common memory have no
  /// limit. A case in which a rank's part is less than a cache line has no limit either. The result is the same on
  /// every rank.
  bool has_limit() const {
    return what_.operation != Operation::kBarrier && what_.memory != BenchMemory::kCommon &&
           what_.bytes >= std::size_t{64} * group_.size();
  }

  /// Returns the traffic that this rank causes when all ranks call. REQUIRES: has_limit().
  MemoryTraffic traffic() const {
    const int ranks = group_.size(), growth = static_cast<int>(sizeof(float) / size_of(what_.dtype));
    switch (what_.operation) {
      case Operation::kAllGather:
        return {1, 1, in_lines((ranks - 1) * part_), 1};
      case Operation::kReduceScatter:
        return {ranks, 1, in_lines(part_ * size_of(what_.dtype)), growth};
      case Operation::kAllReduce:
        return {ranks, ranks, in_lines(part_ * size_of(what_.dtype)), growth};
      case Operation::kBroadcast:
        return {1, 1, group_.rank() == 0 ? 0 : in_lines(what_.bytes), 1};
      case Operation::kAllToAll:
        return {1, 1, in_lines(what_.bytes), 1};
      default:
        return {};
    }
  }

  void cause(bool past_caches) const {
    const MemoryTraffic traffic = this->traffic();
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (int k = 0; k < traffic.reads; ++k) from.push_back(input_ + k * traffic.bytes);
    for (int k = 0; k < traffic.writes; ++k) to.push_back(output_ + k * traffic.bytes * traffic.growth);
    cause_traffic(traffic, from, to, past_caches);
  }

  const CollectiveCase& what() const { return what_; }

 private:
  static std::size_t in_lines(std::size_t bytes) { return bytes / 64 * 64; }

  bool sums() const { return what_.operation == Operation::kReduceScatter || what_.operation == Operation::kAllReduce; }

  void fill() {
    const int rank = group_.rank();
    if (sums()) {
      for (std::size_t i = 0; i < numel_; ++i) write_value(input_, what_.dtype, i, value_of(i, rank));
    } else if (what_.operation == Operation::kAllGather) {
      for (std::size_t i = 0; i < part_; ++i) output_[rank * part_ + i] = byte_of(i, rank);
    } else if (what_.operation == Operation::kBroadcast) {
      for (std::size_t i = 0; i < what_.bytes; ++i) output_[i] = byte_of(i, rank);
    } else if (what_.operation == Operation::kAllToAll) {
      for (std::size_t i = 0; i < part_ * group_.size(); ++i) input_[i] = byte_of(i, rank);
    }
  }

  bool right() const {
    const int ranks = group_.size(), rank = group_.rank();
    bool right = true;
    if (sums()) {
      const bool all = what_.operation == Operation::kAllReduce;
      const std::size_t first = all ? 0 : rank * part_;
      for (std::size_t i = 0; i < (all ? numel_ : part_); ++i) {
        float expected = 0;
        for (int q = 0; q < ranks; ++q) expected += value_of(first + i, q);
        right &= reinterpret_cast<const float*>(output_)[i] == expected;
      }
    } else if (what_.operation == Operation::kBroadcast) {
      for (std::size_t i = 0; i < what_.bytes; ++i) right &= output_[i] == byte_of(i, 0);
    } else if (what_.operation != Operation::kBarrier) {
      const bool gather = what_.operation == Operation::kAllGather;
      for (int q = 0; q < ranks; ++q)
        for (std::size_t i = 0; i < part_; ++i)
          right &= output_[q * part_ + i] == byte_of(gather ? i : rank * part_ + i, q);
    }
    return right;
  }

  Collectives& group_;
  const CollectiveCase what_;
  std::byte *const input_, *const output_;
  const std::size_t numel_, part_;  // elements of the full buffer, and of a rank's part
};

std::vector<CollectiveCase> cases_of(const Collectives& group, const CollectivesBenchOptions& options) {
  std::vector<CollectiveCase> cases = {{}};  // the first case is the barrier
  const auto add = [&](const CollectiveCase& what) {
    if (what.bytes / size_of(what.dtype) / group.size() > 0 || what.operation == Operation::kAllReduce)
      cases.push_back(what);
  };
  for (std::size_t bytes : options.bytes) {
    for (BenchMemory memory : {BenchMemory::kPrivate, BenchMemory::kGroup}) {
      for (Operation operation : {Operation::kAllGather, Operation::kBroadcast, Operation::kAllToAll})
        add({operation, DType::kU8, memory, bytes});
      for (DType dtype : options.dtypes)
        for (Operation operation : {Operation::kReduceScatter, Operation::kAllReduce})
          add({operation, dtype, memory, bytes});
    }
    if (group.shares_memory()) add({Operation::kAllGather, DType::kU8, BenchMemory::kCommon, bytes});
  }
  return cases;
}

/// Makes the buffers of all kinds. An output is large enough for fp32 sums of 16-bit inputs.
absl::StatusOr<std::vector<Buffers>> make_buffers(Collectives& group, std::size_t bytes) {
  std::vector<Buffers> buffers(3);
  auto& own = buffers[static_cast<int>(BenchMemory::kPrivate)];
  own.input = std::make_unique<PlainBuffer>(bytes);
  own.output = std::make_unique<PlainBuffer>(2 * bytes);
  auto& shared = buffers[static_cast<int>(BenchMemory::kGroup)];
  TESSERA_ASSIGN_OR_RETURN(shared.input, group.allocate(bytes));
  TESSERA_ASSIGN_OR_RETURN(shared.output, group.allocate(2 * bytes));
  if (group.shares_memory()) {
    TESSERA_ASSIGN_OR_RETURN(buffers[static_cast<int>(BenchMemory::kCommon)].output, group.allocate_common(bytes));
  }
  return buffers;
}

template <typename Call>
absl::Status time_calls(Collectives& group, int calls, bool in_a_row, Samples& samples, Call call) {
  for (int i = 0; i < calls; ++i) {
    if (!in_a_row || i == 0) TESSERA_RETURN_IF_ERROR(group.barrier("start").wait());
    const auto begin = Clock::now();
    TESSERA_RETURN_IF_ERROR(call());
    samples.ns.push_back(std::chrono::nanoseconds(Clock::now() - begin).count());
  }
  return absl::OkStatus();
}

struct Measured {
  Samples call, plain_limit, streamed_limit;
};

absl::Status measure_once(Collectives& group, Bench& bench, const CollectivesBenchOptions& options,
                          Measured& measured) {
  const std::size_t bytes = bench.what().bytes;
  const std::size_t fit = options.round_bytes / std::max<std::size_t>(bytes, 1);
  const int calls = static_cast<int>(std::clamp<std::size_t>(fit, 1, std::max(options.most_calls, 1)));
  const bool in_a_row = bytes <= kInARow;
  TESSERA_RETURN_IF_ERROR(bench.call());  // this warms up
  TESSERA_RETURN_IF_ERROR(time_calls(group, calls, in_a_row, measured.call, [&] { return bench.call(); }));
  if (!bench.has_limit()) return absl::OkStatus();
  for (bool past_caches : {false, true}) {
    Samples& samples = past_caches ? measured.streamed_limit : measured.plain_limit;
    TESSERA_RETURN_IF_ERROR(time_calls(group, calls, in_a_row, samples, [&] {
      bench.cause(past_caches);
      return absl::OkStatus();
    }));
  }
  return absl::OkStatus();
}

absl::StatusOr<CollectiveTiming> timing_of(Collectives& group, const CollectiveCase& what, Measured& measured) {
  CollectiveTiming timing{what, {}, {}};
  TESSERA_RETURN_IF_ERROR(take_slowest(group, measured.call.ns));
  timing.call = std::move(measured.call);
  if (measured.plain_limit.empty()) return timing;
  TESSERA_RETURN_IF_ERROR(take_slowest(group, measured.plain_limit.ns));
  TESSERA_RETURN_IF_ERROR(take_slowest(group, measured.streamed_limit.ns));
  const bool streamed = measured.streamed_limit.median_s() < measured.plain_limit.median_s();
  timing.limit = std::move(streamed ? measured.streamed_limit : measured.plain_limit);
  return timing;
}

}  // namespace

std::string_view name_of(BenchMemory memory) {
  switch (memory) {
    case BenchMemory::kPrivate:
      return "private";
    case BenchMemory::kGroup:
      return "group";
    case BenchMemory::kCommon:
      return "common";
  }
  return "?";
}

double CollectiveTiming::gigabytes_per_s() const { return static_cast<double>(what.bytes) / call.median_s() * 1e-9; }

double CollectiveTiming::of_limit() const { return limit.empty() ? 0 : limit.median_s() / call.median_s(); }

absl::StatusOr<CollectivesReport> bench_collectives(const Mesh& mesh, const CollectivesBenchOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, mesh.world_size()));
  Collectives& group = *axes.world;
  std::size_t largest = 64;
  for (std::size_t bytes : options.bytes) largest = std::max(largest, bytes);
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Buffers> buffers, make_buffers(group, largest));
  std::vector<Bench> benches;
  for (const CollectiveCase& what : cases_of(group, options))
    benches.emplace_back(group, what, buffers[static_cast<int>(what.memory)]);
  for (Bench& bench : benches) TESSERA_RETURN_IF_ERROR(bench.check());

  std::vector<Measured> measured(benches.size());
  for (int round = 0; round < options.rounds; ++round)
    for (std::size_t i = 0; i < benches.size(); ++i)
      TESSERA_RETURN_IF_ERROR(measure_once(group, benches[i], options, measured[i]));

  CollectivesReport report{group.transport(), group.size(), {}};
  for (std::size_t i = 0; i < benches.size(); ++i) {
    TESSERA_ASSIGN_OR_RETURN(auto timing, timing_of(group, benches[i].what(), measured[i]));
    report.timings.push_back(std::move(timing));
  }
  return report;
}

nlohmann::json to_json(const CollectivesReport& report) {
  nlohmann::json cases = nlohmann::json::array();
  for (const CollectiveTiming& timing : report.timings) {
    const Samples& call = timing.call;
    nlohmann::json one = {{"operation", name_of(timing.what.operation)},
                          {"dtype", name_of(timing.what.dtype)},
                          {"memory", name_of(timing.what.memory)},
                          {"bytes", timing.what.bytes},
                          {"calls", call.ns.size()},
                          {"median_s", call.median_s()},
                          {"p10_s", call.quantile_s(0.1)},
                          {"p90_s", call.quantile_s(0.9)},
                          {"p95_s", call.quantile_s(0.95)},
                          {"p99_s", call.quantile_s(0.99)},
                          {"gb_per_s", timing.gigabytes_per_s()},
                          {"limit_s", nullptr},
                          {"of_limit", nullptr},
                          {"samples_ns", call.ns}};
    if (!timing.limit.empty()) {
      one["limit_s"] = timing.limit.median_s();
      one["of_limit"] = timing.of_limit();
    }
    cases.push_back(std::move(one));
  }
  return {{"transport", report.transport}, {"ranks", report.ranks}, {"cases", std::move(cases)}};
}

}  // namespace tessera
