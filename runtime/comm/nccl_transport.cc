#include "runtime/comm/nccl_transport.h"

#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAFunctions.h>

#include <exception>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "runtime/base/error.h"
#include "runtime/comm/call.h"
#include "runtime/comm/device_memory.h"
#include "runtime/comm/visited_sum.h"
#include "runtime/comm/failure_report.h"

namespace tessera {
namespace {

using Backend = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;
using Started = c10::intrusive_ptr<c10d::Work>;

class NcclCollectives : public Collectives {
 public:
  NcclCollectives(const Group& group, int device, Backend backend, std::shared_ptr<KeyValueStore> store)
      : group_(group),
        device_(at::kCUDA, static_cast<c10::DeviceIndex>(device)),
        report_(group, std::move(store)),
        backend_(std::move(backend)) {}

  /// Calls under way end first; without this ProcessGroupNCCL aborts them.
  ~NcclCollectives() override {
    try {
      const bool unwinding = std::uncaught_exceptions() > exceptions_at_start_;
      if (status_.ok() && !unwinding) backend_->shutdown();
    } catch (const std::exception&) {  // the group is over either way
    }
  }

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  std::string transport() const override { return "nccl"; }
  int gpu() const override { return device_.index(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override;
  Work all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank) override;
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output,
                  std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override;

 protected:
  Work do_reduce_scatter(std::string_view label, const void* input, DType dtype, float* output,
                         std::size_t numel_per_rank, SumVisitor* visitor, Waits) override;
  Work do_all_reduce(std::string_view label, const void* input, DType dtype, float* output, std::size_t numel,
                     SumVisitor* visitor, Waits) override;

 private:
  class Pending;
  using Start = std::function<Started(c10d::ProcessGroupNCCL&)>;
  using Finish = std::function<void()>;

  Work start(Operation operation, std::string_view label, DType dtype, std::size_t count, const Start& start,
             Finish finish = nullptr);
  absl::Status fail(const CallSignature& call, const std::string& why);
  at::Tensor tensor(const void* data, std::size_t numel, at::ScalarType type = at::kByte) const;

  const Group group_;
  const at::Device device_;
  FailureReport report_;
  std::uint64_t sequence_ = 0;
  mutable std::mutex mutex_;  // guards the members below
  Backend backend_;
  absl::Status status_;
  bool aborted_ = false;
  const int exceptions_at_start_ = std::uncaught_exceptions();
};

class NcclCollectives::Pending : public Work::State {
 public:
  Pending(NcclCollectives& owner, const CallSignature& call, Started work, Finish finish)
      : owner_(owner), call_(call), work_(std::move(work)), finish_(std::move(finish)) {}

  absl::Status wait() override try {
    if (work_) work_->wait();
    if (finish_) finish_();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return owner_.fail(call_, text_of_c10_exception(error));
  }

 private:
  NcclCollectives& owner_;
  const CallSignature call_;
  const Started work_;
  const Finish finish_;
};

at::Tensor NcclCollectives::tensor(const void* data, std::size_t numel, at::ScalarType type) const {
  return tensor_on(device_, data, numel, type);
}

Work NcclCollectives::start(Operation operation, std::string_view label, DType dtype, std::size_t count,
                            const Start& start, Finish finish) {
  CallSignature call = make_signature(operation, label, dtype, count);
  call.sequence = ++sequence_;
  Backend backend;
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return Work(status_);
    backend = backend_;
  }
  if (count == 0 && operation != Operation::kBarrier) return Work();
  try {
    return Work(std::make_unique<Pending>(*this, call, start(*backend), std::move(finish)));
  } catch (const std::exception& error) {
    return Work(fail(call, text_of_c10_exception(error)));
  }
}

absl::Status NcclCollectives::fail(const CallSignature& call, const std::string& why) {
  report_.publish_call(call);
  const absl::Status failure = report_.explain(call, "nccl: " + why);
  std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = failure;
  return status_;
}

void NcclCollectives::abort(const absl::Status& reason) {
  Backend backend;
  {
    std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;  // also where a call has failed already: others may be under way
    if (status_.ok()) status_ = reason;
    backend = backend_;
  }
  report_.publish_reason(reason);
  backend->abort();
}

absl::StatusOr<std::unique_ptr<CommBuffer>> NcclCollectives::allocate(std::size_t bytes) {
  absl::StatusOr<std::unique_ptr<CommBuffer>> memory = DeviceBuffer::allocate(bytes, device_);
  if (memory.ok()) return memory;
  return make_error(exit_code_of(memory.status()), group_.self() + ": " + message_of(memory.status()));
}

Work NcclCollectives::all_gather(std::string_view label, const void* shard, void* full,
                                 std::size_t bytes_per_rank) {
  return start(Operation::kAllGather, label, DType::kU8, bytes_per_rank, [&](auto& backend) {
    at::Tensor output = tensor(full, bytes_per_rank * size()), input = tensor(shard, bytes_per_rank);
    return backend._allgather_base(output, input);
  });
}

Work NcclCollectives::do_reduce_scatter(std::string_view label, const void* input, DType dtype, float* output,
                                        std::size_t numel_per_rank, SumVisitor* visitor, Waits) {
  if (auto status = check_device_sum(label, dtype, visitor); !status.ok()) return Work(status);
  const at::Tensor wide = tensor(output, numel_per_rank, at::kFloat);
  at::Tensor sum = dtype == DType::kF32 ? wide : at::empty_like(wide, sum_type_of(dtype));
  return start(
      Operation::kReduceScatter, label, dtype, numel_per_rank,
      [&](auto& backend) {
        at::Tensor addends = tensor(input, numel_per_rank * size(), sum_type_of(dtype));
        return backend._reduce_scatter_base(sum, addends);
      },
      [wide, sum] {
        if (!sum.is_same(wide)) wide.copy_(sum);
      });
}

Work NcclCollectives::do_all_reduce(std::string_view label, const void* input, DType dtype, float* output,
                                    std::size_t numel, SumVisitor* visitor, Waits) {
  if (auto status = check_device_sum(label, dtype, visitor); !status.ok()) return Work(status);
  const at::Tensor wide = tensor(output, numel, at::kFloat);
  const at::Tensor addend = tensor(input, numel, sum_type_of(dtype));
  const at::Tensor sum = dtype == DType::kF32 ? wide : at::empty_like(addend);
  return start(
      Operation::kAllReduce, label, dtype, numel,
      [&](auto& backend) {
        if (sum.data_ptr() != addend.data_ptr()) sum.copy_(addend);
        std::vector<at::Tensor> tensors = {sum};
        return backend.allreduce(tensors);
      },
      [wide, sum] {
        if (!sum.is_same(wide)) wide.copy_(sum);
      });
}

Work NcclCollectives::broadcast(std::string_view label, void* data, std::size_t bytes, int root) {
  return start(Operation::kBroadcast, label, DType::kU8, bytes, [&](auto& backend) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors = {tensor(data, bytes)};
    return backend.broadcast(tensors, options);
  });
}

Work NcclCollectives::all_to_all(std::string_view label, const void* input, void* output,
                                 std::size_t bytes_per_rank) {
  return start(Operation::kAllToAll, label, DType::kU8, bytes_per_rank, [&](auto& backend) {
    at::Tensor to = tensor(output, bytes_per_rank * size()), from = tensor(input, bytes_per_rank * size());
    std::vector<std::int64_t> equal_parts;
    return backend.alltoall_base(to, from, equal_parts, equal_parts);
  });
}

Work NcclCollectives::barrier(std::string_view label) {
  return start(Operation::kBarrier, label, DType::kU8, 0, [&](auto& backend) {
    c10d::BarrierOptions options;
    options.device_ids = {device_.index()};
    return backend.barrier(options);
  });
}

}  // namespace

absl::Status nccl_available() {
  if (c10::cuda::device_count() > 0) return absl::OkStatus();
  return make_error(ExitCode::kUnavailable,
                    "comm.transport wants a GPU, but this machine has no usable CUDA device");
}

absl::StatusOr<int> gpu_count() {
  TESSERA_RETURN_IF_ERROR(nccl_available());
  return c10::cuda::device_count();
}

absl::Status use_gpu(int index) {
  TESSERA_ASSIGN_OR_RETURN(const int count, gpu_count());
  if (index < count) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
    return absl::OkStatus();
  }
  return make_error(ExitCode::kConfig, "local rank " + std::to_string(index) + " wants a GPU of its own, but there are " +
                                           std::to_string(count) + ". hint: start as many ranks a host as it has GPUs");
}

absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group& group, int device,
                                                              std::shared_ptr<C10dStore> store) try {
  TESSERA_RETURN_IF_ERROR(use_gpu(device));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->is_high_priority_stream = true;  // what compute waits for goes first
  options->timeout = std::chrono::milliseconds(static_cast<std::int64_t>(group.timeout_s * 1000));
  const auto own_keys = c10::make_intrusive<c10d::PrefixStore>("nccl/" + group.key(), store->c10d_store());
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(own_keys, group.rank, group.size(), options);
  backend->eagerConnectSingleDevice(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  return std::shared_ptr<Collectives>(
      std::make_shared<NcclCollectives>(group, device, std::move(backend), store));
} catch (const std::exception& error) {
  return make_error(ExitCode::kPeerLost, group.self() + ": group " + group.key() +
                                             " cannot connect with NCCL on device " + std::to_string(device) +
                                             ": " + text_of_c10_exception(error));
}

}  // namespace tessera
