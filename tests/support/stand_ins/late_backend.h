#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/device/device_memory.h"

namespace tessera::testing {

/// A c10d::Backend that behaves as NCCL's does, without a GPU. Calls are made late, when code waits for them, and a
/// call that fails reports the failure afterwards. The backend sends bytes through `group`. Sums are made in fp32, and
/// are then rounded to the dtype of the wire.
class LateBackend : public c10d::Backend {
 public:
  explicit LateBackend(std::shared_ptr<Collectives> group)
      : Backend(group->rank(), group->size()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& = {}) override {
    return later([this, output, input] {
      return group_->all_gather("", input.const_data_ptr(), output.data_ptr(), input.nbytes()).wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& = {}) override {
    return later([this, output, input] {
      at::Tensor wide = input.to(at::kFloat);
      float* const all = wide.data_ptr<float>();
      const auto part = static_cast<std::size_t>(output.numel());
      float* const mine = all + part * static_cast<std::size_t>(getRank());
      absl::Status done = group_->reduce_scatter("", all, DType::kF32, mine, part).wait();
      output.copy_(wide.narrow(0, getRank() * output.numel(), output.numel()));
      return done;
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& = {}) override {
    return later([this, tensor = tensors[0]] {
      at::Tensor wide = tensor.to(at::kFloat);
      float* const all = wide.data_ptr<float>();
      absl::Status done =
          group_->all_reduce("", all, DType::kF32, all, static_cast<std::size_t>(tensor.numel())).wait();
      tensor.copy_(wide);
      return done;
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return later([this, tensor = tensors[0], root = static_cast<int>(options.rootRank)] {
      return group_->broadcast("", tensor.data_ptr(), tensor.nbytes(), root).wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>&,
                                               std::vector<std::int64_t>&, const c10d::AllToAllOptions& = {}) override {
    return later([this, output, input] {
      const std::size_t part = input.nbytes() / static_cast<std::size_t>(getSize());
      return group_->all_to_all("", input.const_data_ptr(), output.data_ptr(), part).wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& = {}) override {
    return later([this] { return group_->barrier("").wait(); });
  }

  void abort() override {
    ++aborts;
    if (abort_fails) throw std::runtime_error("invalid usage");
  }
  void shutdown() override { ++shutdowns; }

  /// The fault that all later calls have.
  enum class Fault { kNone, kStandsStill, kFailsOnTheDevice, kBlocksTheHost };
  std::atomic<Fault> fault = Fault::kNone;
  std::atomic<int> aborts = 0, shutdowns = 0;
  std::atomic<bool> abort_fails = false;

 private:
  class Late : public c10d::Work {
   public:
    Late(Fault fault, std::function<absl::Status()> call) : fault_(fault), call_(std::move(call)) {}
    /// A call counts as done if only the thread that watches calls still holds it.
    bool isCompleted() override {
      const bool is_dropped = c10::raw::intrusive_ptr::use_count(this) <= 2;
      return fault_ == Fault::kFailsOnTheDevice || (fault_ == Fault::kNone && (done_ || is_dropped));
    }
    std::exception_ptr exception() const override {
      if (fault_ != Fault::kFailsOnTheDevice) return nullptr;
      return std::make_exception_ptr(std::runtime_error("remote process exited"));
    }
    /// Makes the call, and throws if the call fails. If there is a fault, the function returns at once: on a GPU, too,
    /// the host does not wait for the end of a call.
    bool wait(std::chrono::milliseconds) override {
      if (fault_ != Fault::kNone) return true;
      const absl::Status status = call_();
      if (!status.ok()) throw std::runtime_error(message_of(status));
      done_ = true;
      return true;
    }

   private:
    const Fault fault_;
    const std::function<absl::Status()> call_;
    std::atomic<bool> done_ = false;
  };

  c10::intrusive_ptr<c10d::Work> later(std::function<absl::Status()> call) {
    while (fault == Fault::kBlocksTheHost) {
      if (aborts > 0) throw std::runtime_error("aborted");
      std::this_thread::yield();
    }
    return c10::make_intrusive<Late>(fault.load(), std::move(call));
  }

  const std::shared_ptr<Collectives> group_;
};

}  // namespace tessera::testing
