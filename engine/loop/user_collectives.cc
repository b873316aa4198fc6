#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include "engine/loop/reduce_tensor.h"
#include "engine/loop/same_call.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/collectives.h"

namespace tessera {
namespace {

const char* name_of(Reduce operation) {
  switch (operation) {
    case Reduce::kSum:
      return "sum";
    case Reduce::kMean:
      return "mean";
    case Reduce::kMin:
      return "min";
    case Reduce::kMax:
      return "max";
  }
  return "?";
}

Collectives& group_of(const Mesh& mesh) { return *value_or_throw(groups_of(mesh).user_group()); }

bool can_travel(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

/// Returns the reason why `tensor` cannot be given to `function`, or an empty text.
std::string problem_of(const char* function, const at::Tensor& tensor) {
  if (!tensor.defined())
    return c10::str(function, " was given an undefined tensor. [T0205] hint: give it a value on every rank");
  const bool dense = tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_meta();
  if (!dense || !can_travel(tensor.scalar_type()))
    return c10::str(
        function, " was given a tensor of ", tensor.toString(), " ", tensor.sizes(),
        ", but takes dense tensors of fp64, fp32, bf16, fp16, integers or bool. [T0206] hint: convert it first");
  return "";
}

std::string words_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "nothing";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

std::string problem_of(Reduce operation, const at::Tensor& tensor) {
  if (std::string problem = problem_of("all_reduce", tensor); !problem.empty()) return problem;
  if (operation == Reduce::kMean && !tensor.is_floating_point())
    return c10::str("all_reduce (mean) was given a tensor of ", tensor.scalar_type(),
                    ", whose mean is no integer. [T0207] hint: convert it to a floating point type");
  if (operation == Reduce::kSum && tensor.scalar_type() == at::kBool)
    return "all_reduce (sum) was given a tensor of bool. [T0208] hint: convert it to an integer type, or take the "
           "maximum (any) or the minimum (all)";
  return "";
}

std::string problem_of_root(const char* function, int root, const Mesh& mesh) {
  if (root >= 0 && root < mesh.world_size()) return "";
  return c10::str(function, " wants a root from 0 to ", mesh.world_size() - 1, ", got ", root,
                  ". [T0209] hint: a root is a rank's number");
}

at::Tensor in_host_memory(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU).contiguous(); }

}  // namespace

void all_reduce(const Mesh& mesh, const at::Tensor& tensor, Reduce operation) {
  const at::NoGradGuard no_grad;
  Collectives& group = group_of(mesh);
  expect_same_call(group, c10::str("all_reduce (", name_of(operation), ") of ", words_of(tensor)),
                   problem_of(operation, tensor));
  if (tensor.numel() == 0) return;
  const at::Tensor result = reduce_over_ranks(group, in_host_memory(tensor).view(-1), operation);
  throw_if_error(group.status());
  tensor.copy_(result.view(tensor.sizes()));
}

std::vector<at::Tensor> all_gather(const Mesh& mesh, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  Collectives& group = group_of(mesh);
  expect_same_call(group, "all_gather of " + words_of(tensor), problem_of("all_gather", tensor));
  const at::Tensor all = gather_over_ranks(group, in_host_memory(tensor).view(-1));
  throw_if_error(group.status());
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& row : all.unbind(0)) {
    // Each tensor gets separate memory, so that a program can keep one tensor without the others.
    tensors.push_back(row.view(tensor.sizes()).to(tensor.device(), /*non_blocking=*/false, /*copy=*/true));
  }
  return tensors;
}

void broadcast(const Mesh& mesh, const at::Tensor& tensor, int root) {
  const at::NoGradGuard no_grad;
  Collectives& group = group_of(mesh);
  std::string problem = problem_of("broadcast", tensor);
  if (problem.empty()) problem = problem_of_root("broadcast", root, mesh);
  expect_same_call(group, c10::str("broadcast from rank ", root, " of ", words_of(tensor)), problem);
  if (tensor.numel() == 0) return;
  const at::Tensor value = in_host_memory(tensor).clone();
  throw_if_error(
      group.broadcast("broadcast", value.mutable_data_ptr(), static_cast<std::size_t>(value.nbytes()), root).wait());
  throw_if_error(group.status());
  if (mesh.rank() != root) tensor.copy_(value);
}

void barrier(const Mesh& mesh) {
  expect_same_call(group_of(mesh), "barrier");  // this call's all-gather returns when all ranks have called it
}

std::vector<std::string> all_gather(const Mesh& mesh, const std::string& own) {
  Collectives& group = group_of(mesh);
  expect_same_call(group, "all_gather of strings");
  return value_or_throw(gather_strings(group, "all_gather of strings", own));
}

std::string broadcast(const Mesh& mesh, const std::string& text, int root) {
  Collectives& group = group_of(mesh);
  expect_same_call(group, c10::str("broadcast from rank ", root, " of a string"),
                   problem_of_root("broadcast", root, mesh));
  return value_or_throw(broadcast_string(group, "broadcast of a string", text, root));
}

double all_reduce_number(const Mesh& mesh, double value, Reduce operation) {
  const at::Tensor tensor = at::scalar_tensor(value, at::kDouble);
  all_reduce(mesh, tensor, operation);
  return tensor.item<double>();
}

std::int64_t all_reduce_number(const Mesh& mesh, std::int64_t value, Reduce operation) {
  const at::Tensor tensor = at::scalar_tensor(value, at::kLong);
  all_reduce(mesh, tensor, operation);
  return tensor.item<std::int64_t>();
}

double mean_over_ranks(const Mesh& mesh, double mean, std::int64_t count) {
  return mean_over_ranks(mesh, std::vector<double>{mean}, count)[0];
}

std::vector<double> mean_over_ranks(const Mesh& mesh, const std::vector<double>& means, std::int64_t count) {
  Collectives& group = group_of(mesh);
  expect_same_call(group, c10::str("mean_over_ranks of ", means.size(), " metrics"),
                   count >= 0 ? ""
                              : c10::str("mean_over_ranks wants a count of 0 or more, got ", count,
                                         ". [T0210] hint: it is how many samples the mean is of"));
  const at::Tensor row = at::zeros({static_cast<std::int64_t>(means.size()) + 1}, at::kDouble);
  double* const values = row.mutable_data_ptr<double>();
  values[0] = static_cast<double>(count);
  for (std::size_t i = 0; i < means.size() && count > 0; ++i) values[i + 1] = means[i] * static_cast<double>(count);
  const at::Tensor sums = reduce_over_ranks(group, row, Reduce::kSum);
  throw_if_error(group.status());
  const double* const sum = sums.const_data_ptr<double>();
  // Every rank has the same sum, so either all ranks throw or none.
  if (sum[0] == 0)
    throw Error(ExitCode::kUsage,
                "mean_over_ranks was given a count of 0 by every rank. [T0211] hint: is the loader empty? A rank "
                "without samples gives 0, but one must have some");
  std::vector<double> result(means.size());
  for (std::size_t i = 0; i < means.size(); ++i) result[i] = sum[i + 1] / sum[0];
  return result;
}

}  // namespace tessera
