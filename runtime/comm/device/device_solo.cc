#include "runtime/comm/device/device_solo.h"

#include <string>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/device/device_memory.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

class DeviceSolo : public Collectives {
 public:
  explicit DeviceSolo(c10::Device device) : device_(device) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  TransportKind kind() const override { return TransportKind::kSolo; }
  std::string transport() const override { return "solo on " + device_.str(); }
  int gpu() const override { return device_.is_cpu() ? kHostMemory : device_.index(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override {
    TESSERA_RETURN_IF_ERROR(status());
    return DeviceBuffer::allocate(bytes, device_);
  }
  Work broadcast(std::string_view, void*, std::size_t, int) override { return Work(status()); }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    return copy(label, input, output, bytes);
  }
  Work barrier(std::string_view) override { return Work(status()); }
  void abort(const absl::Status& reason) override {
    const MutexLock lock(mutex_);
    if (status_.ok()) status_ = reason;
  }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    return copy(call.label, call.shard, call.full, call.bytes_per_rank);
  }
  Work do_reduce(const ReduceCall& call) override {
    if (absl::Status usable = check_device_sum(call.label, call.dtype, call.options.visitor); !usable.ok())
      return Work(usable);
    return run(call.label, [&] {
      if (call.numel == 0 || call.input == call.output) return;
      tensor_on(device_, call.output, call.numel, at::kFloat)
          .copy_(tensor_on(device_, call.input, call.numel, sum_type_of(call.dtype)));
    });
  }

 private:
  absl::Status status() const {
    const MutexLock lock(mutex_);
    return status_;
  }

  template <class Copy>
  Work run(std::string_view label, const Copy& copy) try {
    if (absl::Status ended = status(); !ended.ok()) return Work(ended);
    copy();
    return Work();
  } catch (const std::exception& error) {
    const absl::Status failure = make_error(
        ExitCode::kInternal, std::string(label) + " on " + device_.str() + ": " + text_of_c10_exception(error));
    abort(failure);
    return Work(failure);
  }

  Work copy(std::string_view label, const void* from, void* to, std::size_t bytes) {
    return run(label, [&] {
      if (bytes > 0 && from != to) tensor_on(device_, to, bytes).copy_(tensor_on(device_, from, bytes));
    });
  }

  const c10::Device device_;
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Collectives> solo_on_device(c10::Device device) { return std::make_shared<DeviceSolo>(device); }

}  // namespace tessera
