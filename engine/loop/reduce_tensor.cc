#include "engine/loop/reduce_tensor.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <utility>
#include <vector>

#include "runtime/border/throw.h"

namespace tessera {
namespace {

constexpr std::int64_t kSmallBytes = 64 << 10;

std::size_t bytes_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.nbytes()); }

/// Row i of the result on rank r is row r of `rows` on rank i.
at::Tensor exchange(Collectives& group, const at::Tensor& rows) {
  at::Tensor received = at::empty_like(rows);
  const std::size_t bytes = bytes_of(rows) / static_cast<std::size_t>(group.size());
  throw_if_error(group.all_to_all("all_reduce", rows.const_data_ptr(), received.mutable_data_ptr(), bytes).wait());
  return received;
}

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, Reduce operation) {
  if (operation == Reduce::kMin) return at::minimum(a, b);
  if (operation == Reduce::kMax) return at::maximum(a, b);
  return at::add(a, b);
}

/// Reduces the rows of `rows` to one row, by a tree over neighbours. bf16 and fp16 are added in fp32.
at::Tensor reduced(const at::Tensor& rows, Reduce operation) {
  const at::ScalarType type = rows.scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  std::vector<at::Tensor> left = (narrow ? rows.to(at::kFloat) : rows).unbind(0);
  const auto count = static_cast<std::int64_t>(left.size());
  while (left.size() > 1) {
    std::vector<at::Tensor> next;
    for (std::size_t i = 0; i + 1 < left.size(); i += 2) next.push_back(combined(left[i], left[i + 1], operation));
    if (left.size() % 2 == 1) next.push_back(left.back());
    left = std::move(next);
  }
  at::Tensor result = left[0];
  if (operation == Reduce::kMean) result = at::div(result, count);
  return result.to(type);
}

}  // namespace

at::Tensor gather_over_ranks(Collectives& group, const at::Tensor& part) {
  at::Tensor all = at::empty({group.size(), part.numel()}, part.options());
  throw_if_error(group.all_gather("all_gather", part.const_data_ptr(), all.mutable_data_ptr(), bytes_of(part)).wait());
  return all;
}

at::Tensor reduce_over_ranks(Collectives& group, const at::Tensor& flat, Reduce operation) {
  const at::NoGradGuard no_grad;
  if (static_cast<std::int64_t>(bytes_of(flat)) <= kSmallBytes)
    return reduced(gather_over_ranks(group, flat), operation);
  const std::int64_t parts = group.size(), part = (flat.numel() + parts - 1) / parts;
  const at::Tensor padded = at::zeros({parts * part}, flat.options());
  padded.narrow(0, 0, flat.numel()).copy_(flat);
  const at::Tensor own = reduced(exchange(group, padded.view({parts, part})), operation);
  return gather_over_ranks(group, own.contiguous()).view(-1).narrow(0, 0, flat.numel());
}

}  // namespace tessera
