#include "tessera/comm_hook.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/StringUtil.h>

#include "runtime/border/throw.h"
#include "runtime/comm/collectives.h"

namespace tessera {
namespace {

void expect_dense(const char* call, const std::string& bucket, const at::Tensor& tensor) {
  if (tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu()) return;
  throw Error(ExitCode::kUsage,
              c10::str("CommHook, bucket ", bucket, ": ", call, " was given ",
                       tensor.defined() ? tensor.toString() : "an undefined tensor",
                       ", but takes dense tensors on the CPU. [T0614] hint: .cpu() and .to_dense() make one"));
}

}  // namespace

int CommHook::Ranks::rank() const { return group_.rank(); }

int CommHook::Ranks::size() const { return group_.size(); }

void CommHook::Ranks::all_reduce(const at::Tensor& tensor) {
  expect_dense("all_reduce", label_, tensor);
  if (tensor.scalar_type() != at::kFloat || !tensor.is_contiguous())
    throw Error(ExitCode::kUsage,
                c10::str("CommHook, bucket ", label_, ": all_reduce was given ", tensor.toString(),
                         ", but takes contiguous tensors of fp32. [T0615] hint: .float() and .contiguous() make one"));
  auto* const data = tensor.mutable_data_ptr<float>();
  throw_if_error(group_.all_reduce(label_, data, DType::kF32, data, static_cast<std::size_t>(tensor.numel())).wait());
}

std::vector<at::Tensor> CommHook::Ranks::all_gather(const at::Tensor& tensor) {
  expect_dense("all_gather", label_, tensor);
  const at::Tensor own = tensor.contiguous();
  std::vector<std::int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), size());
  const at::Tensor all = at::empty(sizes, own.options());
  throw_if_error(group_.all_gather(label_, own.const_data_ptr(), all.mutable_data_ptr(), own.nbytes()).wait());
  return all.unbind(0);
}

at::Tensor CommHook::Ranks::all_to_all(const at::Tensor& tensor) {
  expect_dense("all_to_all", label_, tensor);
  if (tensor.dim() == 0 || tensor.size(0) != size())
    throw Error(ExitCode::kUsage,
                c10::str("CommHook, bucket ", label_, ": all_to_all was given a tensor of ", tensor.sizes(),
                         ", but takes one of ", size(),
                         " rows, one a rank. [T0616] hint: its first dimension is the number of ranks, size()"));
  const at::Tensor own = tensor.contiguous(), came = at::empty_like(own);
  throw_if_error(group_
                     .all_to_all(label_, own.const_data_ptr(), came.mutable_data_ptr(),
                                 own.nbytes() / static_cast<std::size_t>(size()))
                     .wait());
  return came;
}

}  // namespace tessera
