#include "runtime/comm/device/queued_collectives.h"

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/call.h"
#include "runtime/comm/device/device_memory.h"
#include "runtime/comm/device/work_watch.h"
#include "runtime/comm/sum/visited_sum.h"
#include "runtime/torch/flat_collectives.h"

namespace tessera {
namespace {

using Started = c10::intrusive_ptr<c10d::Work>;

class QueuedCollectives : public Collectives {
 public:
  QueuedCollectives(const Group& group, QueuedBackend backend, std::shared_ptr<KeyValueStore> store)
      : group_(group),
        queued_(std::move(backend)),
        report_(std::make_shared<FailureReport>(group, std::move(store))),
        place_(queued_.groups->add(
            {queued_.backend, [report = report_](const absl::Status& failure) { report->publish_reason(failure); }})),
        watch_(
            std::in_place, std::chrono::duration<double>(group.timeout_s), queued_.device,
            [report = report_] { return report->news(); },
            [this](const CallSignature& call, const std::string& why) { fail(call, why).IgnoreError(); }) {}

  /// If nothing has failed, calls under way end first. They are watched until they have ended.
  ~QueuedCollectives() override {
    const bool unwinding = std::uncaught_exceptions() > exceptions_at_start_;
    if (!unwinding && status().ok()) watch_->drain();
    watch_.reset();
    if (unwinding)
      queued_.groups->end(
          make_error(ExitCode::kPeerLost,
                     group_.self() + ": left by an exception. [T0459] hint: what that rank printed says which"));
    queued_.groups->remove(place_);
    if (unwinding || !status().ok()) return;
    for (const std::function<void()>& end : {queued_.release_memory, {[this] { queued_.backend->shutdown(); }}}) {
      try {
        end();
      } catch (const std::exception& error) {  // the group is over in any case
        log_warning(group_.self() + ": " + transport() + ": " + text_of_c10_exception(error));
      }
    }
  }

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  TransportKind kind() const override { return queued_.kind; }
  std::string transport() const override { return queued_.backend->getBackendName(); }
  int gpu() const override { return queued_.device.is_cpu() ? kHostMemory : queued_.device.index(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override;
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override;
  absl::Status status() const override { return queued_.groups->status(); }
  std::uint64_t stands_in() const override { return watch_ ? watch_->stands_in() : 0; }

 protected:
  Work do_all_gather(const GatherCall& call) override;
  Work do_reduce(const ReduceCall& call) override;

 private:
  class Pending;
  using Start = std::function<Started(c10d::Backend&)>;
  using Finish = std::function<void()>;

  Work start(Operation operation, std::string_view label, DType dtype, std::size_t count, const Start& start,
             Finish finish = nullptr);
  absl::Status fail(const CallSignature& call, const std::string& why);
  std::string record();
  at::Tensor tensor(const void* data, std::size_t numel, at::ScalarType type = at::kByte) const {
    return tensor_on(queued_.device, data, numel, type);
  }

  const Group group_;
  const QueuedBackend queued_;
  const std::shared_ptr<FailureReport> report_;
  const QueuedGroups::Place place_;
  const int exceptions_at_start_ = std::uncaught_exceptions();
  std::uint64_t sequence_ = 0;
  Mutex failing_;                   // one failure is reported at a time
  std::optional<WorkWatch> watch_;  // the last member is destroyed first, since its thread uses the other members
};

class QueuedCollectives::Pending : public Work::State {
 public:
  Pending(QueuedCollectives& owner, const CallSignature& call, Started work, Finish finish)
      : owner_(owner), call_(call), work_(std::move(work)), finish_(std::move(finish)) {}

  absl::Status wait() override try {
    // This check is first: a wait for a failed call would abort the backend before the reason of its failure is known.
    if (const std::exception_ptr failure = work_->exception()) std::rethrow_exception(failure);
    work_->wait();
    if (finish_) finish_();
    return owner_.status();
  } catch (const std::exception& error) {
    return owner_.fail(call_, text_of_c10_exception(error));
  }

 private:
  QueuedCollectives& owner_;
  const CallSignature call_;
  const Started work_;
  const Finish finish_;
};

Work QueuedCollectives::start(Operation operation, std::string_view label, DType dtype, std::size_t count,
                              const Start& start, Finish finish) {
  CallSignature call = make_signature(operation, label, dtype, count);
  call.sequence = ++sequence_;
  if (absl::Status failed = status(); !failed.ok()) return Work(std::move(failed));
  if (count == 0 && operation != Operation::kBarrier) return Work();
  try {
    watch_->add(call, queued_.mark());
    Started work;
    try {
      work = start(*queued_.backend);
    } catch (...) {
      watch_->set_latest(nullptr);
      throw;
    }
    watch_->set_latest(work);
    return Work(std::make_unique<Pending>(*this, call, std::move(work), std::move(finish)));
  } catch (const std::exception& error) {
    return Work(fail(call, text_of_c10_exception(error)));
  }
}

// --- Failure ---

/// Reports a failure. It runs on the thread that found it.
absl::Status QueuedCollectives::fail(const CallSignature& call, const std::string& why) {
  const MutexLock one_at_a_time(failing_);
  if (absl::Status failed = status(); !failed.ok()) return failed;
  report_->publish_call(call);
  const std::string recorded = record();
  const absl::Status failure =
      report_->explain(call, transport() + ": " + why + (recorded.empty() ? "" : "; " + recorded));
  log_error(message_of(failure));  // also logged: a program that waits for the device may never read it
  queued_.groups->end(failure);
  return status();
}

void QueuedCollectives::abort(const absl::Status& reason) { queued_.groups->end(reason); }

std::string QueuedCollectives::record() try { return queued_.write_record(); } catch (const std::exception& error) {
  return "its flight record cannot be written: " + text_of_c10_exception(error);
}

// --- Calls ---

absl::StatusOr<std::unique_ptr<CommBuffer>> QueuedCollectives::allocate(std::size_t bytes) {
  TESSERA_RETURN_IF_ERROR(status());
  absl::StatusOr<std::unique_ptr<CommBuffer>> memory = queued_.allocate(bytes);
  if (memory.ok()) return memory;
  return make_error(exit_code_of(memory.status()), group_.self() + ": " + message_of(memory.status()));
}

Work QueuedCollectives::do_all_gather(const GatherCall& call) {
  const std::size_t bytes = call.bytes_per_rank;
  return start(Operation::kAllGather, call.label, DType::kU8, bytes, [&](c10d::Backend& backend) {
    at::Tensor output = tensor(call.full, bytes * size()), input = tensor(call.shard, bytes);
    return all_gather_single(backend, output, input);
  });
}

Work QueuedCollectives::do_reduce(const ReduceCall& call) {
  if (auto status = check_device_sum(call.label, call.dtype, call.options.visitor); !status.ok()) return Work(status);
  const auto numel = static_cast<std::int64_t>(call.numel);
  at::Tensor addends = tensor(call.input, call.input_numel(size()), sum_type_of(call.dtype));
  const at::Tensor wide = tensor(call.output, call.numel, at::kFloat);
  at::Tensor sum = addends;
  if (call.scatters) sum = call.dtype == DType::kF32 ? wide : addends.narrow(0, rank() * numel, numel);
  return start(
      call.operation(), call.label, call.dtype, call.numel,
      [&](c10d::Backend& backend) -> Started {
        if (call.scatters) return reduce_scatter_single(backend, sum, addends);
        std::vector<at::Tensor> tensors = {addends};
        return backend.allreduce(tensors);
      },
      [wide, sum] {
        if (sum.const_data_ptr() != wide.const_data_ptr()) wide.copy_(sum);
      });
}

Work QueuedCollectives::broadcast(std::string_view label, void* data, std::size_t bytes, int root) {
  return start(Operation::kBroadcast, label, DType::kU8, bytes, [&](c10d::Backend& backend) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors = {tensor(data, bytes)};
    return backend.broadcast(tensors, options);
  });
}

Work QueuedCollectives::all_to_all(std::string_view label, const void* input, void* output,
                                   std::size_t bytes_per_rank) {
  return start(Operation::kAllToAll, label, DType::kU8, bytes_per_rank, [&](c10d::Backend& backend) {
    at::Tensor to = tensor(output, bytes_per_rank * size()), from = tensor(input, bytes_per_rank * size());
    return all_to_all_single(backend, to, from);
  });
}

Work QueuedCollectives::barrier(std::string_view label) {
  return start(Operation::kBarrier, label, DType::kU8, 0, [&](c10d::Backend& backend) {
    c10d::BarrierOptions options;
    if (!queued_.device.is_cpu()) options.device_ids = {queued_.device.index()};
    return backend.barrier(options);
  });
}

}  // namespace

std::shared_ptr<Collectives> queued_collectives(const Group& group, QueuedBackend backend,
                                                std::shared_ptr<KeyValueStore> store) {
  return std::make_shared<QueuedCollectives>(group, std::move(backend), std::move(store));
}

}  // namespace tessera
