#include "engine/step/agree/straggler_watch.h"

#include <algorithm>
#include <cstdio>

#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr double kTimes = 1.5, kLeastSeconds = 0.010;
constexpr std::size_t kMostNamed = 8;

/// Returns the median. If two values are in the middle, it is the lower one.
double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f ms", seconds * 1e3);
  return text;
}

}  // namespace

WaitedFor waited_for(std::span<const double> busy_seconds, int first_rank) {
  if (busy_seconds.size() < 2) return {};
  const auto slowest = std::ranges::max_element(busy_seconds);
  double less = 0;
  for (const double each : busy_seconds) less += *slowest - each;
  return {first_rank + static_cast<int>(slowest - busy_seconds.begin()),
          less / static_cast<double>(busy_seconds.size() - 1)};
}

/// All memory is allocated here; steps allocate none.
StragglerWatch::StragglerWatch(std::size_t ranks, int first_rank) : first_rank_(first_rank), seconds_(ranks) {
  for (std::vector<double>& each : seconds_) each.reserve(kWindow);
}

std::string StragglerWatch::add(std::span<const double> busy_seconds) {
  for (std::size_t rank = 0; rank < seconds_.size(); ++rank) seconds_[rank].push_back(busy_seconds[rank]);
  if (seconds_[0].size() < kWindow) return "";
  std::string message = look();
  for (std::vector<double>& each : seconds_) each.clear();
  return message;
}

std::string StragglerWatch::look() const {
  std::vector<double> medians;
  for (const std::vector<double>& each : seconds_) medians.push_back(median_of(each));
  const double median = median_of(medians);
  std::vector<std::string> slow;
  for (std::size_t rank = 0; rank < medians.size(); ++rank) {
    if (medians[rank] <= kTimes * median || medians[rank] < median + kLeastSeconds) continue;
    slow.push_back("rank " + std::to_string(static_cast<std::size_t>(first_rank_) + rank) + " is busy for " +
                   milliseconds(medians[rank]) + " a step");
  }
  if (slow.empty()) return "";
  const std::size_t more = slow.size() > kMostNamed ? slow.size() - kMostNamed : 0;
  slow.resize(slow.size() - more);
  return joined(slow) + (more > 0 ? " and " + std::to_string(more) + " more ranks likewise" : "") +
         ", while the median of all ranks is " + milliseconds(median) + ", over the last " + std::to_string(kWindow) +
         " steps: all wait for the slowest. [T0298] hint: look at its data, its processor's clock, and what else runs "
         "there";
}

}  // namespace tessera
