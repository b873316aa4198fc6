#include "runtime/comm/device/staged_collectives.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/device/device_memory.h"
#include "runtime/comm/local/plain_buffer.h"

namespace tessera {
namespace {

class StagedCollectives : public Collectives {
 public:
  StagedCollectives(std::shared_ptr<Collectives> group, c10::Device device)
      : group_(std::move(group)), device_(device) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  TransportKind kind() const override { return group_->kind(); }
  std::string transport() const override { return group_->transport(); }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override {
    return std::unique_ptr<CommBuffer>(std::make_unique<PlainBuffer>(bytes));
  }

  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    if (count() == 1) return alone(data, data, bytes);
    const at::Tensor tensor = up(data, bytes);
    return down(group_->broadcast(label, tensor.data_ptr(), bytes, root).wait(), tensor, data);
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override {
    if (count() == 1) return alone(input, output, bytes_per_rank);
    const at::Tensor from = up(input, bytes_per_rank * count()), to = room(bytes_per_rank * count());
    return down(group_->all_to_all(label, from.data_ptr(), to.data_ptr(), bytes_per_rank).wait(), to, output);
  }
  /// Makes a barrier for which the host waits too.
  Work barrier(std::string_view label) override {
    const absl::Status met = group_->barrier(label).wait();
    std::byte unused;
    return down(met, room(1).zero_(), &unused);
  }
  void abort(const absl::Status& reason) override { group_->abort(reason); }
  void leave() override { group_->leave(); }
  absl::Status status() const override { return group_->status(); }
  bool end_if_left_alone(HasKey has_key) override { return group_->end_if_left_alone(has_key); }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    if (count() == 1) return alone(call.shard, call.full, call.bytes_per_rank);
    const at::Tensor input = up(call.shard, call.bytes_per_rank), output = room(call.bytes_per_rank * count());
    GatherCall there = call;
    there.shard = input.data_ptr();
    there.full = output.data_ptr();
    return down(group_->all_gather(there).wait(), output, call.full);
  }
  Work do_reduce(const ReduceCall& call) override {
    return Work(make_error(ExitCode::kInternal, std::string(call.label) + ": staged collectives make no sums"));
  }

 private:
  /// Makes a call of a group of one rank, which only copies. No data has to go to the device and back. A barrier shows
  /// whether the group has ended.
  Work alone(const void* from, void* to, std::size_t bytes) {
    absl::Status met = group_->barrier("alone").wait();
    if (met.ok() && from != to && bytes > 0) std::memmove(to, from, bytes);
    return Work(std::move(met));
  }
  std::size_t count() const { return static_cast<std::size_t>(group_->size()); }
  at::Tensor room(std::size_t bytes) const {
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  at::Tensor up(const void* data, std::size_t bytes) const {
    const at::Tensor tensor = room(bytes);
    tensor.copy_(tensor_on(at::kCPU, data, bytes));
    return tensor;
  }
  Work down(const absl::Status& done, const at::Tensor& from, void* to) const {
    if (!done.ok()) return Work(done);
    tensor_on(at::kCPU, to, from.nbytes()).copy_(from);
    return Work(group_->status());  // the failure is known now, after the wait for the device
  }

  const std::shared_ptr<Collectives> group_;
  const c10::Device device_;
};

}  // namespace

std::shared_ptr<Collectives> staged_collectives(std::shared_ptr<Collectives> group, c10::Device device) {
  return std::make_shared<StagedCollectives>(std::move(group), device);
}

}  // namespace tessera
