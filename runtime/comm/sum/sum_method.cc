#include "runtime/comm/sum/sum_method.h"

#include <cstring>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/forwarding_collectives.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

class SumsByMethods final : public ForwardingCollectives {
 public:
  using ForwardingCollectives::ForwardingCollectives;

 protected:
  Work do_reduce(const ReduceCall& call) override {
    if (!call.options.method || call.dtype != DType::kF32) return ForwardingCollectives::do_reduce(call);
    const absl::Status status = reduce_by_method(*group_, call);
    if (!status.ok()) group_->abort(status);
    return Work(status);
  }
};

}  // namespace

std::shared_ptr<Collectives> summing_by_methods(std::shared_ptr<Collectives> group) {
  return std::make_shared<SumsByMethods>(std::move(group));
}

absl::Status reduce_by_method(Collectives& group, const ReduceCall& call) {
  auto* const input = static_cast<float*>(call.input);
  const std::size_t numel = call.input_numel(group.size());
  SumMethod& method = *call.options.method;
  TESSERA_RETURN_IF_ERROR(call.options.encoded ? method.of_messages()->sum_messages(group, call.label, input, numel)
                                               : method.sum(group, call.label, input, numel));
  const float* const own = input + (call.scatters ? static_cast<std::size_t>(group.rank()) * call.numel : 0);
  if (call.output != own) std::memcpy(call.output, own, call.numel * sizeof(float));
  visit_sums(call.options.visitor, 0, call.output, call.numel);
  return absl::OkStatus();
}

}  // namespace tessera
