#include "sharding/reduce/comm_hook_method.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"

namespace tessera {

CommHookMethod::CommHookMethod(const FlatGroup& group, std::shared_ptr<CommHook> hook, std::int64_t index)
    : group_(group), hook_(std::move(hook)) {
  bucket_.unit = group.unit->name;
  bucket_.index = index;
  for (const FlatParameter& parameter : group.parameters) bucket_.parts.push_back({parameter.name, at::Tensor()});
}

absl::Status CommHookMethod::sum(Collectives& group, std::string_view label, float* data, std::size_t numel) {
  const at::NoGradGuard no_grad;
  const std::string name(label);
  CommHook::Ranks ranks(group, name);
  bucket_.gradients = at::from_blob(data, {static_cast<std::int64_t>(numel)}, at::TensorOptions(at::kFloat));
  for (std::size_t i = 0; i < bucket_.parts.size(); ++i) {
    const FlatParameter& parameter = group_.parameters[i];
    bucket_.parts[i].gradient =
        bucket_.gradients.as_strided(parameter.sizes, parameter.strides, group_.layout.extent(i).offset);
  }
  try {
    hook_->sum(bucket_, ranks);
  } catch (const Error& error) {
    return make_error(error.exit_code(), error.message());
  } catch (const std::exception& error) {
    return make_error(ExitCode::kInternal, "the program's CommHook, bucket " + bucket_.unit + ": " + error.what());
  }
  const at::Tensor& sums = bucket_.gradients;
  const bool is_fp32 = sums.defined() && sums.is_cpu() && sums.layout() == at::kStrided &&
                       sums.scalar_type() == at::kFloat && sums.is_contiguous();
  if (!is_fp32 || sums.numel() != static_cast<std::int64_t>(numel)) {
    return make_error(ExitCode::kUsage,
                      c10::str("the program's CommHook left ", sums.toString(), " ", sums.sizes(), " in bucket ",
                               bucket_.unit, ", want ", numel,
                               " contiguous numbers of fp32 on the CPU. [T0617] hint: change Bucket::gradients in "
                               "place, or give it a tensor of as many"));
  }
  if (sums.const_data_ptr<float>() != data) std::memcpy(data, sums.const_data_ptr<float>(), numel * sizeof(float));
  return absl::OkStatus();
}

void expect_comm_hook(const CompressionConfig& compression, const CommHook* hook) {
  const bool wants = std::holds_alternative<CommHookConfig>(compression.method);
  if (wants && !hook)
    throw Error(ExitCode::kUsage, "compression.method is of type hook, and the program brings no rule. [T0618] hint: " +
                                      say(phrases::kBringHook));
  if (!wants && hook)
    throw Error(
        ExitCode::kUsage,
        "the Engine is given a CommHook, and compression.method is of another type than hook. [T0619] hint: set "
        "\"compression\": {\"method\": {\"type\": \"hook\"}}");
}

}  // namespace tessera
