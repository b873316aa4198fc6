#include "app/train_report.h"

#include <cstdio>
#include <filesystem>
#include <utility>

#include "runtime/base/bytes.h"
#include "runtime/base/status.h"

namespace tessera::app {

std::string memory_against_plan(const MemoryUse& allocated, const MemoryUse& planned) {
  if (allocated == planned) return format_bytes(allocated.total()) + " = plan";
  return format_bytes(allocated.total()) + " (plan " + format_bytes(planned.total()) + ", difference " +
         format_bytes(allocated.total() - planned.total()) + ")";
}

absl::Status TrainReport::open() {
  if (options_.metrics.empty()) return absl::OkStatus();
  const std::filesystem::path path = options_.metrics;
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  TESSERA_ASSIGN_OR_RETURN(metrics_, MetricsWriter::open(path));
  return absl::OkStatus();
}

absl::Status TrainReport::add(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic) {
  times_.add(result.seconds);
  recent_loss_ += result.loss;
  ++recent_steps_;
  if (result.step % options_.log_every == 0 || result.step == options_.steps) {
    print(result);
    last_mean_loss_ = recent_loss_ / static_cast<double>(recent_steps_);
    last_mean_steps_ = recent_steps_;
    recent_loss_ = 0.0;
    recent_steps_ = 0;
  }
  const absl::Status written = write(result, epoch, traffic);
  before_ = traffic;
  return written;
}

void TrainReport::print(const StepResult& result) const {
  const int width = static_cast<int>(std::to_string(options_.steps).size());
  std::printf("step %*lld/%lld  loss %.4f  norm %.3f  lr %.2e  %.0f tok/s  step p50 %.3f s, p95 %.3f s  %s%s\n", width,
              static_cast<long long>(result.step), static_cast<long long>(options_.steps), result.loss,
              result.grad_norm, result.lr, result.tokens_per_second, times_.p50(), times_.p95(),
              memory_against_plan(result.allocated, result.planned).c_str(),
              result.overflow ? "  overflow, skipped" : "");
  std::fflush(stdout);
}

absl::Status TrainReport::write(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic) {
  if (!metrics_) return absl::OkStatus();
  return metrics_->write({{"step", result.step},
                          {"epoch", epoch},
                          {"loss", result.loss},
                          {"grad_norm", result.grad_norm},
                          {"lr", result.lr},
                          {"overflow", result.overflow},
                          {"loss_scale", result.loss_scale},
                          {"tokens", result.tokens},
                          {"tokens_per_second", result.tokens_per_second},
                          {"seconds", result.seconds},
                          {"communication_seconds", result.communication_seconds},
                          {"seconds_p50", times_.p50()},
                          {"seconds_p95", times_.p95()},
                          {"bytes_allocated", result.allocated.total()},
                          {"bytes_planned", result.planned.total()},
                          {"bytes_gathered", traffic.gathered_bytes - before_.gathered_bytes},
                          {"bytes_reduced", traffic.reduced_bytes - before_.reduced_bytes}});
}

absl::Status TrainReport::finish(std::optional<double> unigram_entropy) {
  std::printf("final loss %.4f (mean of the last %lld steps)", last_mean_loss_,
              static_cast<long long>(last_mean_steps_));
  if (unigram_entropy) std::printf("; unigram entropy %.4f", *unigram_entropy);
  std::printf("\n");
  if (!options_.metrics.empty()) std::printf("metrics are in %s\n", options_.metrics.c_str());
  std::fflush(stdout);
  return metrics_ ? metrics_->close() : absl::OkStatus();
}

}  // namespace tessera::app
