#include "engine/device/queued_call_times.h"

#include <chrono>
#include <utility>

namespace tessera {

std::uint64_t QueuedCallTimes::begin() {
  open_.emplace(++last_, kernels_.begin_interval());
  return last_;
}

void QueuedCallTimes::end(std::uint64_t number, LatencyHistogram& latencies) {
  auto found = open_.extract(number);
  if (found.empty()) return;
  found.mapped()->end();
  ended_.push_back({std::move(found.mapped()), &latencies});
}

void QueuedCallTimes::end_step() {
  close_batch();
  while (!batches_.empty() && batches_.front().mark->passed()) add_first_batch();
}

void QueuedCallTimes::wait() {
  close_batch();
  while (!batches_.empty()) {
    batches_.front().mark->wait();
    add_first_batch();
  }
}

void QueuedCallTimes::close_batch() {
  if (ended_.empty()) return;
  batches_.push_back({kernels_.mark(), std::exchange(ended_, {})});
}

void QueuedCallTimes::add_first_batch() {
  for (const Ended& call : batches_.front().calls) {
    const std::chrono::duration<double> time(call.time->seconds());
    call.latencies->add(std::chrono::duration_cast<std::chrono::nanoseconds>(time));
  }
  batches_.pop_front();
}

}  // namespace tessera
