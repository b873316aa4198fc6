#include "runtime/comm/c10d/c10d_calls.h"

#include <chrono>
#include <stdexcept>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"

namespace tessera {

/// A call under way. The backend uses the call's buffers until the call is over, so the destructor waits for the call
/// too.
class C10dCalls::Pending : public Work::State {
 public:
  Pending(C10dCalls& owner, const CallSignature& call, std::shared_ptr<Transfers> transfers)
      : owner_(owner), call_(call), transfers_(std::move(transfers)) {}
  ~Pending() override {
    if (transfers_) wait().IgnoreError();
  }

  absl::Status wait() override {
    const std::shared_ptr<Transfers> transfers = std::exchange(transfers_, nullptr);
    try {
      if (transfers) transfers->wait();
    } catch (const std::exception& error) {
      transfers->abort();
      return owner_.fail(call_, text_of_c10_exception(error));
    }
    return absl::OkStatus();
  }

 private:
  C10dCalls& owner_;
  const CallSignature call_;
  std::shared_ptr<Transfers> transfers_;
};

CallSignature C10dCalls::begin(Operation operation, std::string_view label, DType dtype, std::size_t count, int root) {
  CallSignature call = make_signature(operation, label, dtype, count, static_cast<std::uint32_t>(root));
  call.sequence = ++sequence_;
  return call;
}

absl::StatusOr<std::pair<C10dCalls::Backend, std::shared_ptr<Transfers>>> C10dCalls::begin_transfers() {
  const auto transfers =
      std::make_shared<Transfers>(means_, std::chrono::milliseconds(static_cast<std::int64_t>(group_.timeout_s * 1000)),
                                  in_backend_, pack_buffers_);
  const MutexLock lock(mutex_);
  if (!status_.ok()) return status_;
  std::erase_if(under_way_, [](const std::weak_ptr<Transfers>& other) { return other.expired(); });
  under_way_.push_back(transfers);
  return std::pair(backend_, transfers);
}

Work C10dCalls::start(const CallSignature& call, const Start& start) {
  auto begun = begin_transfers();
  if (!begun.ok()) return Work(begun.status());
  auto& [backend, transfers] = *begun;
  try {
    // The call of another thread has failed, and that other thread asks the ranks for the reason.
    if (!backend) throw std::runtime_error("the group has failed");
    start(*backend, *transfers);
    return Work(std::make_unique<Pending>(*this, call, transfers));
  } catch (const std::exception& error) {
    backend.reset();
    transfers->abort();
    return Work(fail(call, text_of_c10_exception(error)));
  }
}

absl::Status C10dCalls::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

void C10dCalls::drop_backend() {
  Backend dropped;
  std::vector<std::weak_ptr<Transfers>> under_way;
  {
    const MutexLock lock(mutex_);
    std::swap(dropped, backend_);
    std::swap(under_way, under_way_);
  }
  // Transfers that are under way use the connections too, so these transfers are aborted.
  bool is_in_use = false;
  for (const std::weak_ptr<Transfers>& other : under_way) {
    const std::shared_ptr<Transfers> transfers = other.lock();
    if (!transfers) continue;
    transfers->abort();
    is_in_use = is_in_use || transfers->is_in_collective();
  }
  if (!dropped || !is_in_use) return;
  // Only the backend itself can end its collective: its `abort` does so here. The backend's destructor may wait for the
  // collective, so it runs later (left_in_use_).
  try {
    dropped->abort();
  } catch (const std::exception&) {  // the call cannot be ended; CallWatch then ends the process
  }
  const MutexLock lock(mutex_);
  left_in_use_ = std::move(dropped);
}

absl::Status C10dCalls::fail(const CallSignature& call, const std::string& why) {
  TESSERA_RETURN_IF_ERROR(status());
  report_.publish_call(call);
  drop_backend();
  const absl::Status failure = report_.explain(call, name_ + ": " + why);
  const MutexLock lock(mutex_);
  if (status_.ok()) status_ = failure;
  return status_;
}

Work C10dCalls::refuse(const CallSignature& call, const std::string& why) {
  abort(make_error(ExitCode::kInternal, group_.self() + " " + where(call) + ": " + why));
  return Work(status());
}

void C10dCalls::abort(const absl::Status& reason) {
  {
    const MutexLock lock(mutex_);
    if (!status_.ok()) return;
    status_ = reason;
  }
  report_.publish_reason(reason);
  drop_backend();
}

void C10dCalls::leave() {
  {
    const MutexLock lock(mutex_);
    if (status_.ok())
      status_ = make_error(ExitCode::kUsage,
                           group_.self() + " has left the group. [T0428] hint: make no call after the program's end");
  }
  drop_backend();
}

/// The waiting call finds that its transfers were aborted, and asks the other ranks why (`fail`).
bool C10dCalls::end_if_left_alone(Collectives::HasKey has_key) {
  if (!status().ok() || !report_.is_left_alone(has_key)) return false;
  drop_backend();
  return true;
}

}  // namespace tessera
