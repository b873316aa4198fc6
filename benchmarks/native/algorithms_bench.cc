#include "benchmarks/native/algorithms_bench.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "benchmarks/native/fit_links.h"
#include "benchmarks/native/slowest_rank.h"
#include "runtime/base/status.h"
#include "runtime/comm/rounds/call_work.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<TimedAlgorithm> calls_of(int ranks, const AlgorithmsBenchOptions& options) {
  std::vector<TimedAlgorithm> calls;
  const auto add = [&](Operation operation, DType dtype, std::size_t bytes) {
    for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing, Algorithm::kDoubling, Algorithm::kHalving})
      if (has_algorithm(operation, algorithm, bytes))
        calls.push_back({.operation = operation, .dtype = dtype, .bytes = bytes, .algorithm = algorithm});
  };
  for (const std::size_t bytes : options.bytes) {
    add(Operation::kAllGather, DType::kU8, bytes);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::size_t of_slices = static_cast<std::size_t>(ranks) * size_of(dtype);
      const std::size_t whole = std::max(bytes / of_slices, std::size_t{1}) * of_slices;
      add(Operation::kReduceScatter, dtype, whole);
      add(Operation::kAllReduce, dtype, whole);
    }
  }
  return calls;
}

/// The group's calls, with buffers of their own.
class Caller {
 public:
  static absl::StatusOr<Caller> make(Collectives& group, const std::vector<TimedAlgorithm>& calls) {
    std::size_t most = 0;
    for (const TimedAlgorithm& call : calls) most = std::max(most, call.bytes);
    Caller caller(group);
    // Sums of bf16 are twice as long as it; what is gathered is as long as all ranks' parts.
    const std::size_t ranks = static_cast<std::size_t>(group.size());
    TESSERA_ASSIGN_OR_RETURN(caller.input_, group.allocate(most));
    TESSERA_ASSIGN_OR_RETURN(caller.output_, group.allocate(most * std::max<std::size_t>(2, ranks)));
    return caller;
  }

  absl::Status call(const TimedAlgorithm& what) {
    auto* const sums = reinterpret_cast<float*>(output_->data());
    const std::size_t numel = what.bytes / size_of(what.dtype);
    switch (what.operation) {
      case Operation::kReduceScatter:
        return group_.reduce_scatter("fit", input_->data(), what.dtype, sums, numel / group_.size()).wait();
      case Operation::kAllReduce:
        return group_.all_reduce("fit", input_->data(), what.dtype, sums, numel).wait();
      default:
        return group_.all_gather("fit", input_->data(), output_->data(), what.bytes).wait();
    }
  }

 private:
  explicit Caller(Collectives& group) : group_(group) {}

  Collectives& group_;
  std::unique_ptr<CommBuffer> input_, output_;
};

absl::Status time_once(Collectives& group, Caller& caller, TimedAlgorithm& call,
                       const AlgorithmsBenchOptions& options) {
  const int times = static_cast<int>(
      std::clamp<std::size_t>(options.round_bytes / call.bytes, 1, static_cast<std::size_t>(options.most_calls)));
  TESSERA_RETURN_IF_ERROR(caller.call(call));  // warm
  TESSERA_RETURN_IF_ERROR(group.barrier("fit").wait());
  for (int i = 0; i < times; ++i) {
    const auto begin = Clock::now();
    TESSERA_RETURN_IF_ERROR(caller.call(call));
    call.call.ns.push_back(std::chrono::nanoseconds(Clock::now() - begin).count());
  }
  return absl::OkStatus();
}

/// What is measured of one collective of one size: [first, end).
std::size_t end_of_size(const std::vector<TimedAlgorithm>& timings, std::size_t first) {
  std::size_t end = first + 1;
  while (end < timings.size() && timings[end].operation == timings[first].operation &&
         timings[end].dtype == timings[first].dtype && timings[end].bytes == timings[first].bytes)
    ++end;
  return end;
}

void fit(AlgorithmsReport& report) {
  std::vector<TimedWork> works;
  for (const TimedAlgorithm& timing : report.timings)
    works.push_back({work_of(timing.operation, timing.algorithm, report.ranks, timing.dtype, timing.bytes),
                     timing.call.median_s()});
  report.fit = fit_links(works);
  for (std::size_t i = 0; i < works.size(); ++i) {
    TimedAlgorithm& timing = report.timings[i];
    timing.by_fit_s = report.fit.seconds_of(works[i].work);
    timing.is_chosen =
        choose(timing.operation, report.ranks, timing.dtype, timing.bytes, report.fit) == timing.algorithm;
  }
  for (std::size_t first = 0; first < report.timings.size(); first = end_of_size(report.timings, first)) {
    const auto begin = report.timings.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = report.timings.begin() + static_cast<std::ptrdiff_t>(end_of_size(report.timings, first));
    std::min_element(begin, end, [](const TimedAlgorithm& a, const TimedAlgorithm& b) {
      return a.call.median_s() < b.call.median_s();
    })->is_fastest = true;
  }
}

}  // namespace

std::vector<double> AlgorithmsReport::chosen_of_fastest() const {
  std::vector<double> ratios;
  for (std::size_t first = 0; first < timings.size(); first = end_of_size(timings, first)) {
    double chosen = 0, fastest = 0;
    for (std::size_t i = first; i < end_of_size(timings, first); ++i) {
      if (timings[i].is_chosen) chosen = timings[i].call.median_s();
      if (timings[i].is_fastest) fastest = timings[i].call.median_s();
    }
    ratios.push_back(chosen / fastest);
  }
  return ratios;
}

absl::StatusOr<AlgorithmsReport> bench_algorithms(Collectives& group, const std::function<void(Algorithm)>& use,
                                                  const AlgorithmsBenchOptions& options) {
  AlgorithmsReport report{group.transport(), group.size(), {}, calls_of(group.size(), options)};
  TESSERA_ASSIGN_OR_RETURN(Caller caller, Caller::make(group, report.timings));
  for (int round = 0; round < options.rounds; ++round) {
    for (TimedAlgorithm& timing : report.timings) {
      use(timing.algorithm);
      TESSERA_RETURN_IF_ERROR(time_once(group, caller, timing, options));
    }
  }
  use(Algorithm::kDirect);
  for (TimedAlgorithm& timing : report.timings) TESSERA_RETURN_IF_ERROR(take_slowest(group, timing.call));
  fit(report);
  return report;
}

nlohmann::json to_json(const AlgorithmsReport& report) {
  nlohmann::json calls = nlohmann::json::array();
  for (const TimedAlgorithm& timing : report.timings)
    calls.push_back({{"operation", name_of(timing.operation)},
                     {"dtype", name_of(timing.dtype)},
                     {"bytes", timing.bytes},
                     {"algorithm", name_of(timing.algorithm)},
                     {"median_s", timing.call.median_s()},
                     {"by_fit_s", timing.by_fit_s},
                     {"is_chosen", timing.is_chosen},
                     {"is_fastest", timing.is_fastest},
                     {"samples_ns", timing.call.ns}});
  const LinkFit& fit = report.fit;
  return {
      {"transport", report.transport},
      {"ranks", report.ranks},
      {"fit", {{"round_s", fit.round_s}, {"message_s", fit.message_s}, {"byte_s", fit.byte_s}, {"add_s", fit.add_s}}},
      {"calls", std::move(calls)}};
}

}  // namespace tessera
