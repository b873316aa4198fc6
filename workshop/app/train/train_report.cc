#include "workshop/app/train/train_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "tessera/scaling.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {

// This file turns the results of steps into status lines and metrics.
//
// The functions at the top make the parts of a status line. `add` has an overload for each kind of result. It prints a
// line, if one is due, and gives `write` a row in the form of each kind of file. If a file cannot be written, there is
// a warning, nothing more is written to the file, and training goes on. `finish` returns the first such error.

std::string memory_against_plan(const MemoryUse& allocated, const MemoryUse& planned) {
  if (allocated == planned) return format_bytes(allocated.total()) + " = plan";
  return format_bytes(allocated.total()) + " (plan " + format_bytes(planned.total()) + ", difference " +
         format_bytes(allocated.total() - planned.total()) + ")";
}

std::string duration_text(double seconds) {
  if (!(seconds < 1e9)) return "more than 30 years";
  const auto whole = static_cast<std::int64_t>(std::max(0.0, std::round(seconds)));
  const auto pair = [](std::int64_t first, const char* unit, std::int64_t second, const char* smaller) {
    return std::to_string(first) + unit + std::to_string(second) + smaller;
  };
  if (whole < 60) return std::to_string(whole) + " s";
  if (whole < 3600) return pair(whole / 60, " min ", whole % 60, " s");
  if (whole < 24 * 3600) return pair(whole / 3600, " h ", whole % 3600 / 60, " min");
  return pair(whole / (24 * 3600), " d ", whole % (24 * 3600) / 3600, " h");
}

std::string share_text(double share, int ranks, double measured_speedup) {
  return "comm " + number_text(100 * share, "%.1f") + " %, scaled speed-up " +
         number_text(scaled_speedup(share, ranks), "%.2f") + " of " + std::to_string(ranks) +
         (measured_speedup > 0 ? ", measured " + number_text(measured_speedup, "%.2f") : "");
}

std::string data_text(const StepResult& result) {
  const auto share = [&](double seconds) {
    return number_text(result.seconds > 0 ? 100 * seconds / result.seconds : 0, "%.1f") + " %";
  };
  return "data " + share(result.data_seconds) + " (batches " + share(result.batch_seconds) + ", uploads " +
         share(result.upload_seconds) + ")";
}

std::string batch_advice(double noise_scale, double batch) {
  const double times = noise_scale / batch;
  const std::string text = "critical batch about " + number_text(noise_scale, noise_scale < 10 ? "%.1f" : "%.0f") +
                           " sequences; you use " + number_text(batch, "%.0f");
  if (times >= 1.5)
    return text + ": up to " + number_text(times, times < 10 ? "%.1f" : "%.0f") + " x as many ranks would pay";
  if (times >= 0.5) return text + ": more ranks would pay little";
  return text + ": a smaller batch would learn about as much in a step";
}

std::string flops_text(const StepResult& result) {
  const double tflops = result.tflops();
  const std::string text = number_text(tflops, tflops < 10 ? "%.3f" : "%.1f") + " TFLOP/s";
  return result.peak_tflops > 0 ? text + ", MFU " + number_text(100 * result.mfu(), "%.1f") + " %" : text;
}

std::string straggler_text(const StepResult& result) {
  if (result.waited_for_rank < 0) return "slowest rank not known";
  const double share = result.seconds > 0 ? 100 * result.waited_for_seconds / result.seconds : 0;
  return "waited for rank " + std::to_string(result.waited_for_rank) + ": " +
         number_text(1e3 * result.waited_for_seconds, "%.1f") + " ms (" + number_text(share, "%.1f") + " %)";
}

namespace {

std::vector<Metric> straggler_of(const StepResult& result) {
  if (result.waited_for_rank < 0) return {};
  return {{"waited_for_rank", std::int64_t{result.waited_for_rank}}, {"waited_for_seconds", result.waited_for_seconds}};
}

std::vector<Metric> metrics_of(const EvaluationResult& result) {
  return {{"eval_loss", result.loss}, {"eval_tokens", result.tokens}, {"eval_seconds", result.seconds}};
}

/// Returns one call's latencies as metrics. Their names begin with `before`.
std::vector<Metric> times_of(const CallLatency& latency, const std::string& before) {
  return {{before + "p50_seconds", latency.p50},
          {before + "p95_seconds", latency.p95},
          {before + "p99_seconds", latency.p99},
          {before + "max_seconds", latency.max}};
}

std::vector<Metric> operator+(std::vector<Metric> a, const std::vector<Metric>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

std::vector<std::string> TrainReport::columns() const {
  std::vector<std::string> names = {"run"};
  StepResult all_known;
  all_known.waited_for_rank = 0;
  all_known.peak_tflops = 1;
  for (const Metric& metric : metrics_of(all_known, 0, TrafficCounts{})) names.push_back(metric.name);
  if (!options_.evaluates) return names;
  for (const Metric& metric : app::metrics_of(EvaluationResult{})) names.push_back(metric.name);
  return names;
}

absl::Status TrainReport::open_file(const std::filesystem::path& path, MetricsFormat format) {
  if (path.empty()) return absl::OkStatus();
  const RunOutputs& outputs = options_.outputs;
  MetricsWriter::Options options;
  options.start = outputs.is_restart                        ? MetricsWriter::Start::kAppend
                  : outputs.existing == Existing::kReplaced ? MetricsWriter::Start::kReplace
                                                            : MetricsWriter::Start::kNew;
  options.format = format;
  options.columns = columns();
  TESSERA_ASSIGN_OR_RETURN(MetricsWriter writer, MetricsWriter::open(path, options));
  files_.push_back({path, format, std::move(writer)});
  return absl::OkStatus();
}

absl::Status TrainReport::open(const std::vector<Metric>& about) {
  const RunOutputs& outputs = options_.outputs;
  TESSERA_RETURN_IF_ERROR(open_file(outputs.metrics, metrics_format_of(outputs.metrics)));
  TESSERA_RETURN_IF_ERROR(open_file(outputs.events, MetricsFormat::kEvents));
  write({std::vector<Metric>{{"event", "start"}, {"started", utc_now()}} + about, {}, {}});
  return absl::OkStatus();
}

std::vector<Metric> TrainReport::metrics_of(const StepResult& result, std::int64_t epoch,
                                            const TrafficCounts& traffic) const {
  const double share = result.communication_share();
  std::vector<Metric> metrics = {{"step", result.step},
                                 {"epoch", epoch},
                                 {"loss", result.loss},
                                 {"grad_norm", result.grad_norm},
                                 {"lr", result.lr},
                                 {"overflow", result.overflow},
                                 {"spike", result.spike},
                                 {"loss_scale", result.loss_scale},
                                 {"staleness_mean", result.staleness_mean},
                                 {"staleness_max", result.staleness_max},
                                 {"missed", result.missed},
                                 {"dropped", result.dropped},
                                 {"made_again", result.made_again},
                                 {"noise_scale", result.noise_scale},
                                 {"noise_batch", result.noise_batch},
                                 {"noise_square", result.noise_square},
                                 {"noise_variance", result.noise_variance},
                                 {"tokens", result.tokens},
                                 {"tokens_per_second", result.tokens_per_second},
                                 {"seconds", result.seconds},
                                 {"communication_seconds", result.communication_seconds},
                                 {"communication_share", share},
                                 {"scaled_speedup", scaled_speedup(share, options_.ranks)},
                                 {"scaling_efficiency", scaling_efficiency(share, options_.ranks)},
                                 {"data_seconds", result.data_seconds},
                                 {"batch_seconds", result.batch_seconds},
                                 {"upload_seconds", result.upload_seconds},
                                 {"flop", result.flop},
                                 {"tflops", result.tflops()},
                                 {"seconds_p50", times_.p50()},
                                 {"seconds_p95", times_.p95()},
                                 {"bytes_allocated", result.allocated.total()},
                                 {"bytes_planned", result.planned.total()},
                                 {"bytes_gathered", traffic.gathered_bytes - before_.gathered_bytes},
                                 {"bytes_reduced", traffic.reduced_bytes - before_.reduced_bytes},
                                 {"disk_bytes_read", traffic.disk_bytes_read - before_.disk_bytes_read},
                                 {"disk_bytes_written", traffic.disk_bytes_written - before_.disk_bytes_written},
                                 {"streamed_bytes", traffic.streamed_bytes - before_.streamed_bytes},
                                 {"bytes_to_host", traffic.host_step.to_host - before_.host_step.to_host},
                                 {"bytes_to_gpu", traffic.host_step.to_gpu - before_.host_step.to_gpu},
                                 {"uploaded_bytes", traffic.uploaded_bytes - before_.uploaded_bytes},
                                 {"gradient_bytes_to_host", traffic.gradients.to_host - before_.gradients.to_host},
                                 {"gradient_bytes_to_gpu", traffic.gradients.to_gpu - before_.gradients.to_gpu},
                                 {"disk_wait_seconds", traffic.disk_wait_seconds - before_.disk_wait_seconds}};
  metrics = metrics + straggler_of(result);
  if (result.peak_tflops > 0) metrics.push_back({"mfu", result.mfu()});
  if (options_.alone_s > 0) {
    const double speedup = measured_speedup(result);
    metrics.push_back({"measured_speedup", speedup});
    metrics.push_back({"measured_efficiency", speedup / options_.ranks});
  }
  return metrics;
}

double TrainReport::measured_speedup(const StepResult& result) const {
  return result.seconds > 0 ? options_.ranks * options_.alone_s / result.seconds : 0;
}

void TrainReport::add(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic) {
  times_.add(result.seconds);
  recent_loss_ += result.loss;
  ++recent_steps_;
  dropped_ = result.dropped;
  const std::int64_t before = result.step - std::max<std::int64_t>(1, result.missed);
  if (passes(before, result.step, options_.log_every) || result.step == options_.steps) {
    last_mean_loss_ = recent_loss_ / static_cast<double>(recent_steps_);
    last_mean_steps_ = recent_steps_;
    recent_loss_ = 0.0;
    recent_steps_ = 0;
    print(result);
    advise(result);
  }
  const std::vector<Metric> metrics = metrics_of(result, epoch, traffic);
  write({metrics, metrics, metrics});
  before_ = traffic;
}

void TrainReport::add(std::span<const CallLatency> latencies, std::int64_t after_step) {
  std::vector<Metric> event = {{"step", after_step}};
  for (const CallLatency& each : latencies) {
    event = event + times_of(each, "latency/" + each.call + "/" + each.unit + "/");
    write({std::vector<Metric>{{"event", "latency"},
                               {"after_step", after_step},
                               {"call", each.call},
                               {"unit", each.unit},
                               {"count", each.count}} +
               times_of(each, ""),
           {},
           {}});
  }
  if (!latencies.empty()) write({{}, {}, event});
}

void TrainReport::add(const AgeHistogram& ages, std::int64_t after_step) {
  if (ages.total() == 0) return;
  std::vector<Metric> line = {{"event", "staleness"}, {"after_step", after_step}};
  std::vector<Metric> event = {{"step", after_step}};
  for (std::size_t bucket = 0; bucket < AgeHistogram::kBuckets; ++bucket) {
    line.push_back({AgeHistogram::name_of(bucket), ages.counts[bucket]});
    event.push_back({"staleness/" + AgeHistogram::name_of(bucket), ages.counts[bucket]});
  }
  write({line, {}, event});
}

void TrainReport::add(const EvaluationResult& result, std::int64_t after_step, const TrafficCounts& traffic) {
  std::printf("evaluation after step %lld  loss %.4f  (%lld tokens, %s)\n", static_cast<long long>(after_step),
              result.loss, static_cast<long long>(result.tokens), duration_text(result.seconds).c_str());
  std::fflush(stdout);
  const std::vector<Metric> metrics = app::metrics_of(result);
  const std::vector<Metric> cells = std::vector<Metric>{{"step", after_step}} + metrics;
  write({std::vector<Metric>{{"event", "evaluation"}, {"after_step", after_step}} + metrics, cells, cells});
  before_ = traffic;
}

std::string TrainReport::shown_parts(const StepResult& result) const {
  const auto shows = [&](const char* part) { return std::ranges::find(options_.show, part) != options_.show.end(); };
  std::string text;
  if (shows("share")) text += share_text(result.communication_share(), options_.ranks, measured_speedup(result)) + "  ";
  if (shows("data")) text += data_text(result) + "  ";
  if (shows("flops")) text += flops_text(result) + "  ";
  if (shows("straggler")) text += straggler_text(result) + "  ";
  return text;
}

void TrainReport::print(const StepResult& result) const {
  const int width = static_cast<int>(std::to_string(options_.steps).size());
  const double epochs = static_cast<double>(result.step) / static_cast<double>(options_.steps_per_epoch);
  const std::int64_t left = options_.steps - result.step;
  const std::string time_left =
      left == 0 ? "" : "left " + duration_text(static_cast<double>(left) * times_.p50()) + "  ";
  const std::string predicted =
      options_.predicted_s > 0 ? ", predicted " + number_text(options_.predicted_s, "%.3f") + " s" : "";
  std::printf(
      "step %*lld/%lld  loss %.4f  epoch %.2f  norm %.3f  lr %.2e  %.0f tok/s  step p50 %.3f s, p95 %.3f s%s  "
      "%s%s%s%s\n",
      width, static_cast<long long>(result.step), static_cast<long long>(options_.steps), last_mean_loss_, epochs,
      result.grad_norm, result.lr, result.tokens_per_second, times_.p50(), times_.p95(), predicted.c_str(),
      shown_parts(result).c_str(), time_left.c_str(), memory_against_plan(result.allocated, result.planned).c_str(),
      result.overflow ? "  overflow, skipped"
      : result.spike  ? "  spike, skipped"
                      : "");
  std::fflush(stdout);
}

void TrainReport::advise(const StepResult& result) {
  if (result.noise_scale == 0 || result.noise_scale == advised_scale_) return;
  advised_scale_ = result.noise_scale;
  std::printf("  %s\n", batch_advice(result.noise_scale, result.noise_batch).c_str());
  std::fflush(stdout);
}

void TrainReport::write(const Row& row) {
  const std::vector<Metric> run = {{"run", options_.outputs.run_id}};
  std::erase_if(files_, [&](File& file) {
    const std::vector<Metric>& metrics = file.format == MetricsFormat::kJsonLines ? row.line
                                         : file.format == MetricsFormat::kCsv     ? row.cells
                                                                                  : row.event;
    if (metrics.empty()) return false;
    const absl::Status status = file.writer.write(run + metrics);
    if (!status.ok()) log_warning(message_of(status) + "; training goes on without metrics from here");
    lost_.Update(status);
    return !status.ok();
  });
}

absl::Status TrainReport::finish(std::optional<double> unigram_entropy) {
  if (last_mean_steps_ == 0) {
    std::printf("all steps were done before");
  } else {
    std::printf("final loss %.4f (mean of the last %lld steps)", last_mean_loss_,
                static_cast<long long>(last_mean_steps_));
  }
  if (unigram_entropy) std::printf("; unigram entropy %.4f", *unigram_entropy);
  if (dropped_ > 0) std::printf("; %lld gradients came late and were dropped", static_cast<long long>(dropped_));
  std::printf("\n");
  const RunOutputs& outputs = options_.outputs;
  for (File& file : files_) {
    const absl::Status status = file.writer.close();
    lost_.Update(status);
    if (status.ok()) std::printf("run %s: metrics are in %s\n", outputs.run_id.c_str(), file.path.c_str());
  }
  if (!outputs.weights.empty()) std::printf("weights are in %s\n", outputs.weights.c_str());
  std::fflush(stdout);
  return lost_;
}

}  // namespace tessera::app
