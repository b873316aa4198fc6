#include "tessera/span.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {
namespace {

struct Event {
  std::string name;
  Trace::Clock::time_point begin, end;
  int thread = 0;
};

struct Recorder {
  Mutex mutex;
  std::vector<Event> events ABSL_GUARDED_BY(mutex);
  int threads ABSL_GUARDED_BY(mutex) = 0;
};

Recorder& recorder() {
  static Recorder recorder;
  return recorder;
}

/// Returns this thread's number in the trace. Threads count from 0, in the order of their first spans.
int thread_number(Recorder& recorder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(recorder.mutex) {
  thread_local int number = -1;
  if (number < 0) number = recorder.threads++;
  return number;
}

double microseconds(Trace::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

std::atomic<bool> Trace::on_{false};
std::atomic<const Trace::Listener*> Trace::listener_{nullptr};

void Trace::start() {
  Recorder& all = recorder();
  const MutexLock lock(all.mutex);
  all.events.clear();
  on_.store(true, std::memory_order_relaxed);
}

void Trace::record(std::string_view what, std::string_view subject, Clock::time_point begin, Clock::time_point end) {
  std::string name(what);
  if (!subject.empty()) name.append(" ").append(subject);
  Recorder& all = recorder();
  const MutexLock lock(all.mutex);
  all.events.push_back({std::move(name), begin, end, thread_number(all)});
}

std::string Trace::events_as_json(int process) {
  Recorder& all = recorder();
  const MutexLock lock(all.mutex);
  std::string text;
  for (const Event& event : all.events) {
    const nlohmann::json json = {{"name", event.name},
                                 {"ph", "X"},
                                 {"ts", microseconds(event.begin.time_since_epoch())},
                                 {"dur", microseconds(event.end - event.begin)},
                                 {"pid", process},
                                 {"tid", event.thread}};
    if (!text.empty()) text += ",\n";
    text += json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  return text;
}

}  // namespace tessera
