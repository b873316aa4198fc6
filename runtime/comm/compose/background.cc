#include "runtime/comm/compose/background.h"

#include <functional>
#include <future>
#include <string>
#include <utility>

#include "runtime/comm/compose/call_thread.h"
#include "runtime/comm/forwarding_collectives.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

/// A visitor, and the sums that it gets when the caller waits.
struct Sums {
  SumVisitor* visitor = nullptr;
  const float* values = nullptr;
  std::size_t numel = 0;
};

class BackgroundCollectives final : public ForwardingCollectives {
 public:
  BackgroundCollectives(std::shared_ptr<Collectives> group, bool gathers)
      : ForwardingCollectives(std::move(group)), gathers_(gathers) {}

  bool reduces_in_background() const override { return true; }
  bool gathers_in_background() const override { return gathers_ || group_->gathers_in_background(); }
  bool shares_memory() const override { return false; }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate_common(std::size_t bytes) override {
    return Collectives::allocate_common(bytes);
  }
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override { return idle().allocate(bytes); }
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return idle().broadcast(label, data, bytes, root);
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override {
    return idle().all_to_all(label, input, output, bytes_per_rank);
  }
  Work barrier(std::string_view label) override { return idle().barrier(label); }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    if (!gathers_) return idle().all_gather(call);
    return start([group = group_.get(), name = std::string(call.label), call] {
      GatherCall named = call;
      named.label = name;
      return group->all_gather(named).wait();
    });
  }
  /// The group's thread makes the call and waits for it at once. The visitor gets the sums on the thread that waits for
  /// the returned Work.
  Work do_reduce(const ReduceCall& call) override {
    if (call.options.waits == Waits::kAtOnce) return idle().reduce(call);
    const auto reduce = [group = group_.get(), name = std::string(call.label), call] {
      ReduceCall at_once = call;
      at_once.label = name;
      at_once.options.waits = Waits::kAtOnce;
      at_once.options.visitor = nullptr;
      return group->reduce(at_once).wait();
    };
    return start(reduce, {call.options.visitor, call.output, call.numel});
  }

 private:
  class Started;
  Work start(std::function<absl::Status()> call, const Sums& sums = {});
  Collectives& idle() {
    thread_.wait_for_all();
    return *group_;
  }

  const bool gathers_;
  absl::Status failure_;  // the first failure, which all later calls return; only the thread uses this
  CallThread thread_;     // the last member is destroyed first, since its calls need the other members
};

class BackgroundCollectives::Started final : public Work::State {
 public:
  Started(std::future<absl::Status> end, const Sums& sums) : end_(std::move(end)), sums_(sums) {}
  ~Started() override {
    if (end_.valid()) end_.wait();
  }

  absl::Status wait() override {
    const absl::Status status = end_.get();
    if (status.ok()) visit_sums(sums_.visitor, 0, sums_.values, sums_.numel);
    return status;
  }

 private:
  std::future<absl::Status> end_;
  const Sums sums_;
};

Work BackgroundCollectives::start(std::function<absl::Status()> call, const Sums& sums) {
  std::future<absl::Status> end = thread_.push([this, call = std::move(call)] {
    if (failure_.ok()) failure_ = call();
    return failure_;
  });
  return Work(std::make_unique<Started>(std::move(end), sums));
}

}  // namespace

std::shared_ptr<Collectives> reducing_in_background(std::shared_ptr<Collectives> group) {
  return std::make_shared<BackgroundCollectives>(std::move(group), /*gathers=*/false);
}

std::shared_ptr<Collectives> working_in_background(std::shared_ptr<Collectives> group) {
  return std::make_shared<BackgroundCollectives>(std::move(group), /*gathers=*/true);
}

}  // namespace tessera
