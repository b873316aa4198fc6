#include "runtime/comm/c10d/transfers.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/torch/flat_collectives.h"

namespace tessera {
namespace {

constexpr const char* kAborted = "the group has failed";

at::Tensor as_tensor(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte);
}

}  // namespace

void Transfers::gather_packed(c10d::Backend& backend, int tag, std::optional<DType> numbers, const void* shard,
                              RankParts<void> full, std::size_t bytes) {
  if (bytes == 0) return;
  if (means_ == Means::kMessages) {
    auto* const all = static_cast<std::byte*>(full.first);
    send_and_receive(backend, tag, {static_cast<const std::byte*>(shard), 0, all, full.stride}, bytes, numbers);
    std::byte* const kept = all + static_cast<std::size_t>(backend.getRank()) * full.stride;
    if (shard != kept) std::memcpy(kept, shard, bytes);
    return;
  }
  at::Tensor output = as_tensor(full.first, bytes * static_cast<std::size_t>(backend.getSize())),
             input = as_tensor(shard, bytes);
  const MutexLock lock(in_backend_);
  collective_ = all_gather_single(backend, output, input);
}

void Transfers::gather_coded(c10d::Backend& backend, int tag, const WireCoding& coding, const void* shard,
                             RankParts<void> full, std::size_t numel) {
  const std::size_t bytes = coding.bytes(numel);
  if (!coding.rounds()) return gather_packed(backend, tag, coding.packs(), shard, full, bytes);
  if (numel == 0) return;
  const int ranks = backend.getSize();
  PackBuffer codes = buffers_.take(bytes * static_cast<std::size_t>(ranks));
  std::byte* const all = codes.data();
  std::byte* const own = all + static_cast<std::size_t>(backend.getRank()) * bytes;
  coding.write(shard, 0, numel, own);
  rounded_.push_back({coding, numel, full.stride, ranks, full.first, std::move(codes)});
  gather(backend, tag, own, all, bytes);
}

void Transfers::exchange(c10d::Backend& backend, int tag, RankParts<const void> input, void* output, std::size_t bytes,
                         std::optional<DType> numbers) {
  if (bytes == 0) return;
  if (means_ == Means::kMessages) {
    const Places places{static_cast<const std::byte*>(input.first), input.stride, static_cast<std::byte*>(output),
                        bytes};
    return send_and_receive(backend, tag, places, bytes, numbers);
  }
  const std::size_t all = bytes * static_cast<std::size_t>(backend.getSize());
  at::Tensor to = as_tensor(output, all), from = as_tensor(input.first, all);
  const MutexLock lock(in_backend_);
  collective_ = all_to_all_single(backend, to, from);
}

void Transfers::broadcast(c10d::Backend& backend, void* data, std::size_t bytes, int root) {
  if (bytes == 0) return;
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors = {as_tensor(data, bytes)};
  const MutexLock lock(in_backend_);
  collective_ = backend.broadcast(tensors, options);
}

void Transfers::barrier(c10d::Backend& backend) {
  const MutexLock lock(in_backend_);
  collective_ = backend.barrier();
}

void Transfers::send(c10d::Backend& backend, int tag, int to, const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  std::vector<at::Tensor> part = {as_tensor(data, bytes)};
  const MutexLock lock(in_backend_);
  add_message(backend.send(part, to, tag));
}

void Transfers::receive(c10d::Backend& backend, int tag, int from, void* data, std::size_t bytes) {
  if (bytes == 0) return;
  std::vector<at::Tensor> part = {as_tensor(data, bytes)};
  const MutexLock lock(in_backend_);
  add_message(backend.recv(part, from, tag));
}

// Each rank first sends to the rank after itself, so that not all ranks send to the same rank at the same time.
void Transfers::send_and_receive(c10d::Backend& backend, int tag, const Places& places, std::size_t bytes,
                                 std::optional<DType> numbers) {
  const int rank = backend.getRank(), size = backend.getSize();
  const bool packs = numbers && is_packed(*numbers, bytes);
  for (int i = 1; i < size; ++i) {
    const int from = (rank + size - i) % size;
    std::byte* const place = places.output + static_cast<std::size_t>(from) * places.output_stride;
    packs ? receive_packed(backend, tag, from, place, bytes, *numbers) : receive(backend, tag, from, place, bytes);
  }
  for (int i = 1; i < size; ++i) {
    const int to = (rank + i) % size;
    const std::byte* const data = places.input + static_cast<std::size_t>(to) * places.stride;
    if (!packs) {
      send(backend, tag, to, data, bytes);
      continue;
    }
    if (i == 1 || places.stride != 0) sent_.push_back(packed_message(*numbers, data, bytes, buffers_));
    send(backend, tag, to, sent_.back().data(), bytes_of_message(sent_.back()));
  }
}

void Transfers::receive_packed(c10d::Backend& backend, int tag, int from, void* data, std::size_t bytes, DType dtype) {
  const std::size_t most = most_message_bytes(dtype, bytes);
  packed_.push_back({dtype, bytes, data, buffers_.take(most)});
  receive(backend, tag, from, packed_.back().buffer.data(), most);
}

void Transfers::add_message(c10::intrusive_ptr<c10d::Work> work) {
  const MutexLock lock(mutex_);
  if (is_aborted_) {
    work->abort();  // no other code aborts `work`, which would write to memory that the caller frees
    throw std::runtime_error(kAborted);
  }
  messages_.push_back(std::move(work));
}

void Transfers::wait() {
  if (collective_) {
    struct InCollective {
      explicit InCollective(std::atomic<bool>& flag) : flag(flag) { flag = true; }
      ~InCollective() { flag = false; }
      std::atomic<bool>& flag;
    } in_collective(is_in_collective_);
    collective_->wait();
  }
  if (deadline_ == std::chrono::steady_clock::time_point()) deadline_ = std::chrono::steady_clock::now() + timeout_;
  for (std::size_t i = 0;; ++i) {
    c10::intrusive_ptr<c10d::Work> message;
    {
      const MutexLock lock(mutex_);
      if (is_aborted_) throw std::runtime_error(kAborted);
      if (i == messages_.size()) {
        messages_.clear();
        break;
      }
      message = messages_[i];
    }
    const auto left = deadline_ - std::chrono::steady_clock::now();
    // A limit of 0 would mean no limit.
    const auto limit =
        std::max(std::chrono::duration_cast<std::chrono::milliseconds>(left), std::chrono::milliseconds(1));
    if (!message->wait(limit)) throw std::runtime_error(kAborted);
  }
  sent_.clear();
  for (const Packed& packed : packed_) unpack_message(packed.buffer, packed.dtype, packed.to, packed.bytes);
  packed_.clear();
  for (const Rounded& each : rounded_) {
    const std::size_t bytes = each.coding.bytes(each.numel);
    for (std::size_t q = 0; q < static_cast<std::size_t>(each.ranks); ++q)
      each.coding.read(each.codes.data() + q * bytes, static_cast<std::byte*>(each.to) + q * each.stride, each.numel);
  }
  rounded_.clear();
}

void Transfers::abort() {
  const MutexLock lock(mutex_);
  is_aborted_ = true;
  for (const auto& message : messages_) message->abort();
  messages_.clear();
}

}  // namespace tessera
