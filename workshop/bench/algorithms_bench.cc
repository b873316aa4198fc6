#include "workshop/bench/algorithms_bench.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/rounds/call_work.h"

namespace tessera {
namespace {

/// Returns the end of the measurements of one collective and size. They begin at `first`.
std::size_t end_of_size(const std::vector<TimedAlgorithm>& timings, std::size_t first) {
  const TimedCall& begin = timings[first].call;
  std::size_t end = first + 1;
  while (end < timings.size() && timings[end].call.operation == begin.operation &&
         timings[end].call.dtype == begin.dtype && timings[end].call.bytes == begin.bytes)
    ++end;
  return end;
}

void judge(AlgorithmsReport& report) {
  for (TimedAlgorithm& timing : report.timings) {
    const TimedCall& call = timing.call;
    timing.by_fit_s =
        report.fit.seconds_of(work_of(call.operation, call.algorithm, report.ranks, call.dtype, call.bytes));
    timing.is_chosen = choose(call.operation, report.ranks, call.dtype, call.bytes, report.fit) == call.algorithm;
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
  std::vector<TimedCall> calls;
  for (const std::size_t bytes : options.bytes)
    for (TimedCall& call : calls_to_time(group.size(), bytes)) calls.push_back(std::move(call));
  const auto times = [&](const TimedCall& call) {
    const auto most = static_cast<std::size_t>(options.most_calls);
    return static_cast<int>(std::clamp<std::size_t>(options.round_bytes / call.bytes, 1, most));
  };
  for (int round = 0; round < options.rounds; ++round) TESSERA_RETURN_IF_ERROR(time_calls(group, calls, use, times));
  AlgorithmsReport report{group.transport(), group.size(), fit_calls(group.size(), calls), {}};
  for (TimedCall& call : calls) report.timings.push_back({.call = std::move(call)});
  judge(report);
  return report;
}

nlohmann::json to_json(const AlgorithmsReport& report) {
  nlohmann::json calls = nlohmann::json::array();
  for (const TimedAlgorithm& timing : report.timings)
    calls.push_back({{"operation", name_of(timing.call.operation)},
                     {"dtype", name_of(timing.call.dtype)},
                     {"bytes", timing.call.bytes},
                     {"algorithm", name_of(timing.call.algorithm)},
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
