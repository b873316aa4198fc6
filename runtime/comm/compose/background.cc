#include "runtime/comm/compose/background.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/call.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

/// A reduction that was asked for.
struct Reduction {
  Operation operation;
  std::string label;
  void* input;
  DType dtype;
  float* output;
  std::size_t numel;
  ReduceOptions options;  ///< but for `waits`: the thread waits at once
};

/// Reductions of one group, made in their order by a thread that begins with the first and ends with the object.
class ReductionThread {
 public:
  explicit ReductionThread(Collectives& group) : group_(group) {}
  ~ReductionThread() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
  }
  ReductionThread(const ReductionThread&) = delete;
  ReductionThread& operator=(const ReductionThread&) = delete;

  /// Its number. Ends of reductions are asked for in their order.
  std::uint64_t push(Reduction reduction) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::jthread([this] { run(); });
    waiting_.push_back(std::move(reduction));
    changed_.notify_all();
    return pushed_++;
  }

  /// Of a reduction that is over. The first failure is everybody's after it.
  absl::Status wait(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ > number; });
    return number < failed_from_ ? absl::OkStatus() : failure_;
  }

  void wait_for_all() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ == pushed_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Reduction next = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      const absl::Status status = make(next);
      lock.lock();
      if (!status.ok() && failure_.ok()) {
        failure_ = status;
        failed_from_ = done_;
      }
      ++done_;
      changed_.notify_all();
    }
  }

  absl::Status make(const Reduction& next) {
    ReduceOptions options = next.options;
    options.waits = Waits::kAtOnce;
    if (next.operation == Operation::kAllReduce)
      return group_.all_reduce(next.label, next.input, next.dtype, next.output, next.numel, nullptr, options).wait();
    return group_.reduce_scatter(next.label, next.input, next.dtype, next.output, next.numel, nullptr, options).wait();
  }

  Collectives& group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Reduction> waiting_;
  std::uint64_t pushed_ = 0, done_ = 0, failed_from_ = ~std::uint64_t{0};
  absl::Status failure_;
  bool ends_ = false;
  std::jthread thread_;  // last: it is joined first
};

class BackgroundCollectives final : public Collectives {
 public:
  explicit BackgroundCollectives(std::shared_ptr<Collectives> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  TransportKind kind() const override { return group_->kind(); }
  std::string transport() const override { return group_->transport(); }
  int gpu() const override { return group_->gpu(); }
  bool reduces_in_background() const override { return true; }
  bool gathers_in_background() const override { return group_->gathers_in_background(); }
  int compressed_part() const override { return group_->compressed_part(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override { return idle().allocate(bytes); }
  Work all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank) override {
    return idle().all_gather(label, shard, full, bytes_per_rank);
  }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return idle().broadcast(label, data, bytes, root);
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override {
    return idle().all_to_all(label, input, output, bytes_per_rank);
  }
  Work barrier(std::string_view label) override { return idle().barrier(label); }
  void abort(const absl::Status& reason) override { group_->abort(reason); }
  void leave() override { group_->leave(); }
  absl::Status status() const override { return group_->status(); }

 protected:
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                         SumVisitor* visitor, const ReduceOptions& options) override {
    if (options.waits == Waits::kAtOnce)
      return idle().reduce_scatter(label, input, dtype, output, numel_per_rank, visitor, options);
    return start({Operation::kReduceScatter, std::string(label), input, dtype, output, numel_per_rank, options},
                 visitor);
  }
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     SumVisitor* visitor, const ReduceOptions& options) override {
    if (options.waits == Waits::kAtOnce) return idle().all_reduce(label, input, dtype, output, numel, visitor, options);
    return start({Operation::kAllReduce, std::string(label), input, dtype, output, numel, options}, visitor);
  }

 private:
  class Started;

  Work start(Reduction reduction, SumVisitor* visitor);
  Collectives& idle() {
    thread_.wait_for_all();
    return *group_;
  }

  const std::shared_ptr<Collectives> group_;
  ReductionThread thread_{*group_};
};

class BackgroundCollectives::Started final : public Work::State {
 public:
  Started(ReductionThread& thread, Reduction reduction, SumVisitor* visitor)
      : thread_(thread), output_(reduction.output), numel_(reduction.numel), visitor_(visitor) {
    number_ = thread.push(std::move(reduction));
  }
  ~Started() override {
    if (!is_over_) thread_.wait(number_).IgnoreError();
  }

  absl::Status wait() override {
    const absl::Status status = thread_.wait(number_);
    is_over_ = true;
    if (status.ok()) visit_sums(visitor_, 0, output_, numel_);
    return status;
  }

 private:
  ReductionThread& thread_;
  const float* const output_;
  const std::size_t numel_;
  SumVisitor* const visitor_;
  std::uint64_t number_ = 0;
  bool is_over_ = false;
};

Work BackgroundCollectives::start(Reduction reduction, SumVisitor* visitor) {
  return Work(std::make_unique<Started>(thread_, std::move(reduction), visitor));
}

}  // namespace

std::shared_ptr<Collectives> reducing_in_background(std::shared_ptr<Collectives> group) {
  return std::make_shared<BackgroundCollectives>(std::move(group));
}

}  // namespace tessera
