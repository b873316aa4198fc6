#include "runtime/comm/c10d/c10d_collectives.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/call.h"
#include "runtime/comm/local/plain_buffer.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

constexpr std::size_t kSmallBytes = 64 << 10;

at::Tensor as_tensor(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte);
}

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Started = c10::intrusive_ptr<c10d::Work>;
using Scratch = std::unique_ptr<std::byte[]>;

Scratch make_scratch(std::size_t bytes) { return Scratch(new std::byte[bytes]); }

class C10dCollectives : public Collectives {
 public:
  C10dCollectives(const Group& group, TransportKind kind, Backend backend, std::shared_ptr<KeyValueStore> store)
      : group_(group),
        kind_(kind),
        name_(backend->getBackendName()),
        report_(group, std::move(store)),
        backend_(std::move(backend)) {}

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  TransportKind kind() const override { return kind_; }
  std::string transport() const override { return name_; }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override {
    TESSERA_RETURN_IF_ERROR(status());
    return std::unique_ptr<CommBuffer>(std::make_unique<PlainBuffer>(bytes));
  }
  Work all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank) override;
  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override;
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) override;
  Work barrier(std::string_view label) override;
  void abort(const absl::Status& reason) override;

 protected:
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                         SumVisitor* visitor, Waits) override;
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     SumVisitor* visitor, Waits) override;

 private:
  class Pending;
  using Start = std::function<Started(c10d::Backend&)>;
  using Finish = std::function<void()>;

  CallSignature begin(Operation operation, std::string_view label, DType dtype, std::size_t count, int root = 0);
  Work start(const CallSignature& call, const Start& start, Finish finish = nullptr);
  Work refuse(const CallSignature& call, const std::string& why);
  absl::Status fail(const CallSignature& call, const std::string& why);
  absl::Status status() const;
  void drop_backend();

  Started gather(c10d::Backend& backend, const void* shard, void* full, std::size_t bytes) const;
  Started exchange(c10d::Backend& backend, const void* input, void* output, std::size_t bytes) const;
  void sum_parts(const std::byte* parts, DType dtype, float* output, std::size_t numel, SumVisitor* visitor) const;
  absl::Status reduce_small(const CallSignature& call, const void* input, float* output, std::size_t numel,
                            SumVisitor* visitor);
  absl::Status reduce_large(const CallSignature& call, const std::byte* input, float* output, std::size_t numel,
                            SumVisitor* visitor);

  const Group group_;
  const TransportKind kind_;
  const std::string name_;
  FailureReport report_;
  std::uint64_t sequence_ = 0;
  mutable std::mutex mutex_;  // guards the members below
  Backend backend_;
  absl::Status status_;
};

/// A call under way. Its buffers are the backend's until it is over, so it is waited for in any case.
class C10dCollectives::Pending : public Work::State {
 public:
  Pending(C10dCollectives& owner, const CallSignature& call, Started work, Finish finish)
      : owner_(owner), call_(call), work_(std::move(work)), finish_(std::move(finish)) {}
  ~Pending() override {
    if (work_) wait().IgnoreError();
  }

  absl::Status wait() override {
    const Started work = std::exchange(work_, nullptr);
    try {
      if (work) work->wait();
    } catch (const std::exception& error) {
      return owner_.fail(call_, text_of_c10_exception(error));
    }
    if (finish_) finish_();
    return absl::OkStatus();
  }

 private:
  C10dCollectives& owner_;
  const CallSignature call_;
  Started work_;
  const Finish finish_;
};

CallSignature C10dCollectives::begin(Operation operation, std::string_view label, DType dtype, std::size_t count,
                                     int root) {
  CallSignature call = make_signature(operation, label, dtype, count, static_cast<std::uint32_t>(root));
  call.sequence = ++sequence_;
  return call;
}

Work C10dCollectives::start(const CallSignature& call, const Start& start, Finish finish) {
  Backend backend;
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return Work(status_);
    backend = backend_;
  }
  try {
    return Work(std::make_unique<Pending>(*this, call, start(*backend), std::move(finish)));
  } catch (const std::exception& error) {
    backend.reset();
    return Work(fail(call, text_of_c10_exception(error)));
  }
}

absl::Status C10dCollectives::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

void C10dCollectives::drop_backend() {
  Backend dropped;
  std::lock_guard lock(mutex_);
  std::swap(dropped, backend_);
}

absl::Status C10dCollectives::fail(const CallSignature& call, const std::string& why) {
  TESSERA_RETURN_IF_ERROR(status());
  report_.publish_call(call);
  drop_backend();
  const absl::Status failure = report_.explain(call, name_ + ": " + why);
  std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = failure;
  return status_;
}

Work C10dCollectives::refuse(const CallSignature& call, const std::string& why) {
  abort(make_error(ExitCode::kInternal, group_.self() + " " + where(call) + ": " + why));
  return Work(status());
}

void C10dCollectives::abort(const absl::Status& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ = reason;
  }
  report_.publish_reason(reason);
  drop_backend();
}

// --- Moving bytes ---

Started C10dCollectives::gather(c10d::Backend& backend, const void* shard, void* full, std::size_t bytes) const {
  at::Tensor output = as_tensor(full, bytes * size()), input = as_tensor(shard, bytes);
  return bytes == 0 ? nullptr : backend._allgather_base(output, input);
}

Started C10dCollectives::exchange(c10d::Backend& backend, const void* input, void* output, std::size_t bytes) const {
  at::Tensor to = as_tensor(output, bytes * size()), from = as_tensor(input, bytes * size());
  std::vector<std::int64_t> equal_parts;
  return bytes == 0 ? nullptr : backend.alltoall_base(to, from, equal_parts, equal_parts);
}

Work C10dCollectives::all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank) {
  const CallSignature call = begin(Operation::kAllGather, label, DType::kU8, bytes_per_rank);
  return start(call, [&](c10d::Backend& backend) { return gather(backend, shard, full, bytes_per_rank); });
}

Work C10dCollectives::all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes_per_rank) {
  const CallSignature call = begin(Operation::kAllToAll, label, DType::kU8, bytes_per_rank);
  return start(call, [&](c10d::Backend& backend) { return exchange(backend, input, output, bytes_per_rank); });
}

Work C10dCollectives::broadcast(std::string_view label, void* data, std::size_t bytes, int root) {
  const CallSignature call = begin(Operation::kBroadcast, label, DType::kU8, bytes, root);
  if (root < 0 || root >= size())
    return refuse(call, "root is " + std::to_string(root) + " of " + std::to_string(size()) + " ranks");
  return start(call, [&](c10d::Backend& backend) -> Started {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors = {as_tensor(data, bytes)};
    return bytes == 0 ? nullptr : backend.broadcast(tensors, options);
  });
}

Work C10dCollectives::barrier(std::string_view label) {
  return start(begin(Operation::kBarrier, label, DType::kU8, 0),
               [](c10d::Backend& backend) { return backend.barrier(); });
}

// --- Sums ---

void C10dCollectives::sum_parts(const std::byte* parts, DType dtype, float* output, std::size_t numel,
                                SumVisitor* visitor) const {
  std::vector<const void*> sources;
  for (int q = 0; q < size(); ++q) sources.push_back(parts + q * numel * size_of(dtype));
  visited_sum(sources, dtype, {&output, 1}, numel, visitor);
}

Work C10dCollectives::do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output,
                                        std::size_t numel_per_rank, SumVisitor* visitor, Waits) {
  const CallSignature call = begin(Operation::kReduceScatter, label, dtype, numel_per_rank);
  if (!is_reducible(dtype)) return refuse(call, "sums are of fp32, bf16 or fp16, got " + std::string(name_of(dtype)));
  const std::size_t bytes = numel_per_rank * size_of(dtype);
  const std::shared_ptr<std::byte[]> parts = make_scratch(bytes * size());
  return start(
      call, [&](c10d::Backend& backend) { return exchange(backend, input, parts.get(), bytes); },
      [=, this] { sum_parts(parts.get(), dtype, output, numel_per_rank, visitor); });
}

Work C10dCollectives::do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                                    SumVisitor* visitor, Waits) {
  const CallSignature call = begin(Operation::kAllReduce, label, dtype, numel);
  if (!is_reducible(dtype)) return refuse(call, "sums are of fp32, bf16 or fp16, got " + std::string(name_of(dtype)));
  if (numel * size_of(dtype) <= kSmallBytes) return Work(reduce_small(call, input, output, numel, visitor));
  return Work(reduce_large(call, static_cast<const std::byte*>(input), output, numel, visitor));
}

absl::Status C10dCollectives::reduce_small(const CallSignature& call, const void* input, float* output,
                                           std::size_t numel, SumVisitor* visitor) {
  const std::size_t bytes = numel * size_of(call.dtype);
  const Scratch all = make_scratch(bytes * size());
  return start(
             call, [&](c10d::Backend& backend) { return gather(backend, input, all.get(), bytes); },
             [&] { sum_parts(all.get(), call.dtype, output, numel, visitor); })
      .wait();
}

// In equal parts, the last padded: exchange, add this rank's part, gather.
absl::Status C10dCollectives::reduce_large(const CallSignature& call, const std::byte* input, float* output,
                                           std::size_t numel, SumVisitor* visitor) {
  const std::size_t part = (numel + size() - 1) / size(), padded = part * size(), element = size_of(call.dtype);
  const Scratch parts = make_scratch(padded * element);
  Scratch padded_input;
  if (padded != numel) {
    padded_input = make_scratch(padded * element);
    std::memcpy(padded_input.get(), input, numel * element);
    std::memset(padded_input.get() + numel * element, 0, (padded - numel) * element);
    input = padded_input.get();
  }
  std::vector<float> sums(part);
  TESSERA_RETURN_IF_ERROR(
      start(
          call, [&](c10d::Backend& backend) { return exchange(backend, input, parts.get(), part * element); },
          [&] { sum_parts(parts.get(), call.dtype, sums.data(), part, nullptr); })
          .wait());
  const Scratch whole = padded == numel ? nullptr : make_scratch(padded * sizeof(float));
  void* const destination = whole ? static_cast<void*>(whole.get()) : output;
  TESSERA_RETURN_IF_ERROR(start(call, [&](c10d::Backend& backend) {
                            return gather(backend, sums.data(), destination, part * sizeof(float));
                          }).wait());
  if (whole) std::memcpy(output, whole.get(), numel * sizeof(float));
  visit_sums(visitor, 0, output, numel);
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<Collectives> c10d_collectives(const Group& group, TransportKind kind,
                                              c10::intrusive_ptr<c10d::Backend> backend,
                                              std::shared_ptr<KeyValueStore> store) {
  return std::make_shared<C10dCollectives>(group, kind, std::move(backend), std::move(store));
}

}  // namespace tessera
