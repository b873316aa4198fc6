#include "runtime/comm/local/local_collectives.h"

#include <array>
#include <cstring>

#include "runtime/base/rank_name.h"
#include "runtime/base/status.h"
#include "runtime/comm/local/plain_buffer.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace

absl::Status LocalCollectives::status() const { return aborted_ ? reason_ : absl::OkStatus(); }

void LocalCollectives::abort(const absl::Status& reason) {
  if (aborting_.exchange(true)) return;
  reason_ = reason;
  aborted_ = true;
}

absl::StatusOr<std::unique_ptr<CommBuffer>> LocalCollectives::allocate(std::size_t bytes) {
  TESSERA_RETURN_IF_ERROR(status());
  return std::unique_ptr<CommBuffer>(std::make_unique<PlainBuffer>(bytes));
}

absl::StatusOr<std::unique_ptr<CommBuffer>> LocalCollectives::allocate_common(std::size_t bytes) {
  return one_host_ ? allocate(bytes) : Collectives::allocate_common(bytes);
}

Work LocalCollectives::do_all_gather(const GatherCall& call) {
  bytes_received_ += (size_ - 1) * call.bytes_per_rank;
  copy_bytes(static_cast<std::byte*>(call.full) + rank_ * call.bytes_per_rank, call.shard, call.bytes_per_rank);
  return Work(status());
}

Work LocalCollectives::do_reduce(const ReduceCall& call) {
  const auto& [scatters, label, given, dtype, output, numel, options] = call;
  bytes_received_ +=
      scatters ? (size_ - 1) * numel * size_of(dtype) : (size_ - 1) * numel * (size_of(dtype) + sizeof(float)) / size_;
  if (!is_reducible(dtype))
    return Work(make_error(ExitCode::kInternal, rank_name(rank_, size_) + " " + std::string(label) +
                                                    ": sums are of fp32, bf16 or fp16, got " +
                                                    std::string(name_of(dtype))));
  const std::byte* const input = static_cast<const std::byte*>(given) + (scatters ? rank_ * numel * size_of(dtype) : 0);
  const std::array<const void*, 1> only = {input};
  if (only[0] == output)
    visit_sums(options.visitor, 0, output, numel);
  else
    visited_sum(only, dtype, {&output, 1}, numel, options.visitor);
  return Work(status());
}

Work LocalCollectives::broadcast(std::string_view, void*, std::size_t bytes, int root) {
  if (rank_ != root) bytes_received_ += bytes;
  return Work(status());
}

Work LocalCollectives::all_to_all(std::string_view, const void* input, void* output, std::size_t bytes_per_rank) {
  bytes_received_ += (size_ - 1) * bytes_per_rank;
  const std::size_t mine = rank_ * bytes_per_rank;
  copy_bytes(static_cast<std::byte*>(output) + mine, static_cast<const std::byte*>(input) + mine, bytes_per_rank);
  return Work(status());
}

Work LocalCollectives::barrier(std::string_view) { return Work(status()); }

}  // namespace tessera
