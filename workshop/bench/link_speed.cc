#include "workshop/bench/link_speed.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/base/status.h"
#include "workshop/bench/samples.h"

namespace tessera {
namespace {

// This file measures links.
//
// LinkMeter times each operation over buffers of growing size (`measure`). It times the operation alone and, if the
// transport works in the background, together with computation (`busy_median_of`). It fits alpha and beta to the
// medians. Every median is that of the slowest rank (`agreed`), so all ranks report the same figures. `measure_loads`
// and `measure_coding` then compare a loop that computes alone with the same loop while a call or a codec runs
// (`lost_beside`). The difference is the time by which the call or the codec slows computation down.

using Clock = std::chrono::steady_clock;
constexpr double kLongCall = 0.25;         // seconds
constexpr std::int64_t kSmallBytes = 256;  // approximate bytes of a rank in a step's agreement

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Returns the CPU time of the calling thread, in seconds.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

AlphaBeta fit_of(const std::vector<TimedBytes>& points) {
  const AlphaBeta fit = fit_alpha_beta(points);
  return {std::max(0.0, fit.alpha_s), std::max(0.0, fit.beta_s_per_byte)};
}

/// Makes the measurements with its own buffers.
class LinkMeter {
 public:
  LinkMeter(Collectives& gather, Collectives& reduce, const LinkSpeedOptions& options)
      : gather_(gather), reduce_(reduce), options_(options), ranks_(gather.size()) {}

  absl::Status take_memory() {
    const auto bytes = static_cast<std::size_t>(std::max(options_.most_bytes, ranks_ * kSmallBytes));
    TESSERA_ASSIGN_OR_RETURN(full_, gather_.allocate(bytes));
    TESSERA_ASSIGN_OR_RETURN(bucket_, reduce_.allocate(bytes));
    TESSERA_ASSIGN_OR_RETURN(sums_, reduce_.allocate(bytes));
    return absl::OkStatus();
  }

  absl::StatusOr<LinkSpeed> run() {
    LinkSpeed speed;
    Links& links = speed.links;
    links.transport = reduce_.transport();
    links.ranks = ranks_;
    links.hosts = options_.hosts;
    links.reduces_in_background = reduce_.reduces_in_background();
    links.gathers_in_background = gather_.gathers_in_background();
    TESSERA_ASSIGN_OR_RETURN(MeasuredOperation small, measure("small", {ranks_ * kSmallBytes}, 1,
                                                              &LinkMeter::all_gather, /*in_background=*/false));
    links.small = {.alpha_s = small.points.front().seconds, .beta_s_per_byte = 0};
    const std::pair<const char*, OperationFit*> kinds[] = {{"all_gather", &links.all_gather},
                                                           {"reduce_scatter", &links.reduce_scatter},
                                                           {"all_reduce", &links.all_reduce}};
    const Call calls[] = {&LinkMeter::all_gather, &LinkMeter::reduce_scatter, &LinkMeter::all_reduce};
    for (std::size_t i = 0; i < std::size(kinds); ++i) {
      const auto& [name, fit] = kinds[i];
      TESSERA_ASSIGN_OR_RETURN(MeasuredOperation operation,
                               measure(name, sizes(), i == 2 ? 2 : 1, calls[i],
                                       i == 0 ? links.gathers_in_background : links.reduces_in_background));
      *fit = operation.fit;
      speed.operations.push_back(std::move(operation));
    }
    if (links.reduces_in_background) TESSERA_RETURN_IF_ERROR(measure_loads(links));
    TESSERA_RETURN_IF_ERROR(measure_coding(speed));
    return speed;
  }

 private:
  /// A call of an operation. `bytes` is the size of the full buffer: the output of an all-gather, or a rank's input of
  /// a reduction.
  using Call = absl::Status (LinkMeter::*)(std::int64_t bytes);

  absl::Status all_gather(std::int64_t bytes) { return start_all_gather(bytes).wait(); }
  Work start_all_gather(std::int64_t bytes) {
    const std::size_t part = static_cast<std::size_t>(bytes / ranks_);
    std::byte* const full = full_->data();
    return gather_.all_gather("links", full + static_cast<std::size_t>(gather_.rank()) * part, full, part);
  }
  absl::Status reduce_scatter(std::int64_t bytes) {
    return reduce_
        .reduce_scatter("links", bucket_->data(), DType::kF32, sums(), static_cast<std::size_t>(bytes / ranks_ / 4),
                        Waits::kLater)
        .wait();
  }
  absl::Status all_reduce(std::int64_t bytes) { return start_all_reduce(bytes).wait(); }
  Work start_all_reduce(std::int64_t bytes) {
    return reduce_.all_reduce("links", bucket_->data(), DType::kF32, sums(), static_cast<std::size_t>(bytes / 4),
                              Waits::kLater);
  }
  float* sums() const { return reinterpret_cast<float*>(sums_->data()); }

  /// Returns the sizes of buffers, ascending. The buffers are as large as those of units. A small buffer would look
  /// fast, since a link takes some bytes at once before it slows down.
  std::vector<std::int64_t> sizes() const {
    std::vector<std::int64_t> all;
    for (std::int64_t bytes = std::int64_t{512} << 10; bytes <= options_.most_bytes; bytes *= 8)
      all.push_back(bytes / (4 * ranks_) * (4 * ranks_));
    return all;
  }

  /// Returns the largest `seconds` of all ranks, so that all ranks report the same figure.
  absl::StatusOr<double> agreed(double seconds) {
    std::vector<double> all(static_cast<std::size_t>(ranks_));
    TESSERA_RETURN_IF_ERROR(gather_.all_gather("links' times", &seconds, all.data(), sizeof seconds).wait());
    return std::ranges::max(all);
  }

  absl::StatusOr<double> median_of(Call call, std::int64_t bytes) {
    constexpr int kFewest = 3, kMost = 200;
    TESSERA_RETURN_IF_ERROR((this->*call)(bytes));  // this warms up
    TESSERA_RETURN_IF_ERROR(gather_.barrier("links").wait());
    const auto first = Clock::now();
    TESSERA_RETURN_IF_ERROR((this->*call)(bytes));
    TESSERA_ASSIGN_OR_RETURN(const double once, agreed(since(first)));
    const int times = std::clamp(static_cast<int>(options_.seconds / std::max(once, 1e-6)), kFewest, kMost);
    TESSERA_ASSIGN_OR_RETURN(const double median, median_of(call, bytes, times));
    return agreed(median);
  }
  absl::StatusOr<double> median_of(Call call, std::int64_t bytes, int times) {
    Samples samples;
    for (int i = 0; i < times; ++i) {
      const auto begin = Clock::now();
      TESSERA_RETURN_IF_ERROR((this->*call)(bytes));
      samples.ns.push_back(nanoseconds(since(begin)));
    }
    return samples.median_s();
  }

  /// Returns the median time of calls that another thread makes while this thread computes. `seconds` is the time of a
  /// call.
  absl::StatusOr<double> busy_median_of(Call call, std::int64_t bytes, double seconds) {
    constexpr int kFewest = 5, kMost = 100;
    constexpr std::int64_t kShort = 200;
    const int times = std::clamp(static_cast<int>(options_.seconds / seconds), kFewest, kMost);
    TESSERA_RETURN_IF_ERROR(gather_.barrier("links").wait());
    absl::StatusOr<double> median = 0;
    std::atomic<bool> ends = false;
    std::thread other([&] {
      median = median_of(call, bytes, times);
      ends = true;
    });
    while (!ends) compute(kShort);
    other.join();
    TESSERA_RETURN_IF_ERROR(median.status());
    return agreed(*median);
  }

  /// Measures an operation. A rank sends the other ranks' share of a buffer `times` times. If `in_background` is true,
  /// the operation is also measured while the ranks compute.
  absl::StatusOr<MeasuredOperation> measure(const char* name, const std::vector<std::int64_t>& buffers, int times,
                                            Call call, bool in_background) {
    MeasuredOperation operation;
    operation.name = name;
    for (const std::int64_t bytes : buffers) {
      const std::vector<TimedBytes>& points = operation.points;
      // The next size would take eight times as long as this one.
      if (points.size() > 1 && points.back().seconds > kLongCall) break;
      TESSERA_ASSIGN_OR_RETURN(const double seconds, median_of(call, bytes));
      const std::int64_t sent = times * (bytes / ranks_ * (ranks_ - 1));
      operation.points.push_back({sent, seconds});
      if (!in_background) continue;
      TESSERA_ASSIGN_OR_RETURN(const double busy, busy_median_of(call, bytes, seconds));
      operation.busy_points.push_back({sent, busy});
    }
    if (operation.points.size() < 2) return operation;
    const AlphaBeta fit = fit_of(operation.points);
    operation.fit = {fit.alpha_s, fit.beta_s_per_byte};
    if (operation.busy_points.empty()) return operation;
    const AlphaBeta busy = fit_of(operation.busy_points);
    operation.fit.busy_alpha_s = busy.alpha_s;
    operation.fit.busy_beta_s_per_byte = busy.beta_s_per_byte;
    return operation;
  }

  /// Keeps one core busy, with numbers in its cache.
  double compute(std::int64_t rounds) {
    std::vector<float> values(4096, 1.0f);
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < rounds; ++i) {
      for (float& value : values) value = value * 0.999f + 0.001f;
    }
    const double seconds = since(begin);
    busy_ = values[static_cast<std::size_t>(rounds) % values.size()];
    return seconds;
  }

  /// Returns the number of rounds of `compute` that take about `seconds` on the slowest rank.
  absl::StatusOr<std::int64_t> rounds_of(double seconds) {
    constexpr std::int64_t kTry = 2000;
    TESSERA_ASSIGN_OR_RETURN(const double once, agreed(compute(kTry)));
    return static_cast<std::int64_t>(seconds / std::max(once, 1e-6) * kTry) + 1;
  }

  /// Returns the seconds by which the work that `begin` starts slows computation down: the difference of two medians,
  /// each of `times` samples. `begin` returns a function that ends the work.
  template <class Begin>
  absl::StatusOr<double> lost_beside(std::int64_t rounds, int times, const Begin& begin) {
    Samples alone, beside;
    for (int i = 0; i < times; ++i) {
      TESSERA_RETURN_IF_ERROR(gather_.barrier("links").wait());
      alone.ns.push_back(nanoseconds(compute(rounds)));
      TESSERA_RETURN_IF_ERROR(gather_.barrier("links").wait());
      auto end = begin();
      beside.ns.push_back(nanoseconds(compute(rounds)));
      TESSERA_RETURN_IF_ERROR(end());
    }
    return std::max(0.0, beside.median_s() - alone.median_s());
  }

  /// Returns the seconds by which a call slows computation down. `start` begins one call, which takes about `seconds`.
  template <class Start>
  absl::StatusOr<double> measure_load(double seconds, const Start& start) {
    // The computation takes somewhat longer than the call, so that the whole call runs at the same time as computation.
    TESSERA_ASSIGN_OR_RETURN(const std::int64_t rounds, rounds_of(1.5 * std::max(seconds, 0.02)));
    const auto begin = [&] { return [work = std::make_shared<Work>(start())] { return work->wait(); }; };
    TESSERA_ASSIGN_OR_RETURN(const double lost, lost_beside(rounds, /*times=*/7, begin));
    return agreed(lost);
  }

  /// Measures, with an all-gather, how much computation time a byte on the wire costs. The extra time of an all-reduce
  /// then gives the cost of a byte that is added up.
  absl::Status measure_loads(Links& links) {
    const std::int64_t bytes = sizes()[1];
    const auto others = static_cast<double>(bytes / ranks_ * (ranks_ - 1));
    TESSERA_ASSIGN_OR_RETURN(const double gather_s, median_of(&LinkMeter::all_gather, bytes));
    TESSERA_ASSIGN_OR_RETURN(const double gather, measure_load(gather_s, [&] { return start_all_gather(bytes); }));
    links.cpu_s_per_byte = gather / others;
    TESSERA_ASSIGN_OR_RETURN(const double reduce_s, median_of(&LinkMeter::all_reduce, bytes));
    TESSERA_ASSIGN_OR_RETURN(const double reduce, measure_load(reduce_s, [&] { return start_all_reduce(bytes); }));
    links.sum_s_per_byte = std::max(0.0, reduce - 2 * gather) / others;
    return absl::OkStatus();
  }

  absl::Status measure_coding(LinkSpeed& speed) {
    CodingFit& coding = speed.links.coding;
    TESSERA_RETURN_IF_ERROR(gather_.barrier("links").wait());  // all ranks then measure at once
    speed.codecs = measure_codecs();
    const auto slowest = [&](WireForm form) {
      const auto codec = std::ranges::find(speed.codecs, form, &CodecSpeed::form);
      return agreed(codec->seconds_per_byte);
    };
    TESSERA_ASSIGN_OR_RETURN(coding.lossless_s_per_byte, slowest(WireForm::kLossless));
    TESSERA_ASSIGN_OR_RETURN(coding.int8_s_per_byte, slowest(WireForm::kInt8));
    TESSERA_ASSIGN_OR_RETURN(coding.int4_s_per_byte, slowest(WireForm::kInt4));
    TESSERA_ASSIGN_OR_RETURN(coding.load, measure_coding_load());
    return absl::OkStatus();
  }

  /// Returns the share of its time that computation loses while a thread encodes and decodes int8: the lost seconds,
  /// divided by the seconds in which that thread has a core.
  absl::StatusOr<double> measure_coding_load() {
    TESSERA_ASSIGN_OR_RETURN(const std::int64_t rounds, rounds_of(/*seconds=*/0.1));
    CodecRun codec(std::size_t{64} << 10);
    Samples coding;
    std::atomic<bool> ends = false;
    double on_a_core = 0;
    const auto begin = [&] {
      ends = false;
      auto coder = std::make_shared<std::thread>([&] {
        while (!ends) codec.there_and_back(WireForm::kInt8);
        on_a_core = thread_seconds();
      });
      return [&, coder] {
        ends = true;
        coder->join();
        coding.ns.push_back(nanoseconds(on_a_core));
        return absl::OkStatus();
      };
    };
    TESSERA_ASSIGN_OR_RETURN(const double lost, lost_beside(rounds, /*times=*/5, begin));
    return agreed(std::min(lost / std::max(coding.median_s(), 1e-9), 1.0));
  }

  Collectives& gather_;
  Collectives& reduce_;
  const LinkSpeedOptions options_;
  const int ranks_;
  std::unique_ptr<CommBuffer> full_, bucket_, sums_;
  volatile float busy_ = 0;  ///< this keeps the compiler from leaving out `compute`
};

}  // namespace

absl::StatusOr<LinkSpeed> measure_links(Collectives& gather, Collectives& reduce, const LinkSpeedOptions& options) {
  LinkMeter meter(gather, reduce, options);
  TESSERA_RETURN_IF_ERROR(meter.take_memory());
  return meter.run();
}

}  // namespace tessera
