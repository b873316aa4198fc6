#include "sharding/gather/data_wait.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "sharding/gather/op_watch.h"

namespace tessera {

/// A wait for data. Times are counts of Clock. The thread that began the wait may still access it while another thread
/// drives the Engine, so members are atomic.
struct DataWait::Stretch {
  void end(Clock::time_point now) {
    const Clock::rep begin = began.exchange(kNone);
    if (begin != kNone) waited += std::max<Clock::rep>(0, now.time_since_epoch().count() - begin);
  }

  static constexpr Clock::rep kNone = -1;
  std::atomic<Clock::rep> began{kNone};
  std::atomic<Clock::rep> waited{0};
  std::atomic<bool> looks{false};
  std::atomic<bool> is_measured{false};  ///< whether a wait began since the last `take`

  /// Returns the waits that this thread began and that may not have ended.
  static std::vector<std::shared_ptr<Stretch>>& of_this_thread() {
    thread_local std::vector<std::shared_ptr<Stretch>> all;
    return all;
  }
};

DataWait::DataWait() : stretch_(std::make_shared<Stretch>()) {}

DataWait::~DataWait() {
  end();
  auto& all = Stretch::of_this_thread();
  std::erase(all, stretch_);
  if (all.empty()) forget_first_read();
}

void DataWait::look() { stretch_->looks = true; }
bool DataWait::looks() const { return stretch_->looks; }

void DataWait::begin(Clock::time_point now) {
  if (stretch_->began.load() != Stretch::kNone || !watch_for_first_read(stretch_->looks)) return;
  stretch_->is_measured = true;
  stretch_->began = now.time_since_epoch().count();
  auto& all = Stretch::of_this_thread();
  if (std::ranges::find(all, stretch_) == all.end()) all.push_back(stretch_);
}

void DataWait::end() { stretch_->end(Clock::now()); }

double DataWait::take() {
  const Clock::duration waited(stretch_->waited.exchange(0));
  if (!stretch_->is_measured.exchange(false)) return std::numeric_limits<double>::quiet_NaN();
  return std::chrono::duration<double>(waited).count();
}

void DataWait::parameter_is_read() {
  auto& all = Stretch::of_this_thread();
  if (all.empty()) return;
  const Clock::time_point now = Clock::now();
  for (const auto& stretch : all) stretch->end(now);
  all.clear();
}

}  // namespace tessera
