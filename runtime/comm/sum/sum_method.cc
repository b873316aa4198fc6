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
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                         const ReduceOptions& options) override {
    if (!options.method || dtype != DType::kF32)
      return ForwardingCollectives::do_reduce_scatter(label, input, dtype, output, numel_per_rank, options);
    return ended(reduce_scatter_by(*group_, label, static_cast<float*>(input), output, numel_per_rank, options));
  }
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     const ReduceOptions& options) override {
    if (!options.method || dtype != DType::kF32)
      return ForwardingCollectives::do_all_reduce(label, input, dtype, output, numel, options);
    return ended(all_reduce_by(*group_, label, static_cast<float*>(input), output, numel, options));
  }

 private:
  Work ended(const absl::Status& status) {
    if (!status.ok()) group_->abort(status);
    return Work(status);
  }
};

}  // namespace

std::shared_ptr<Collectives> summing_by_methods(std::shared_ptr<Collectives> group) {
  return std::make_shared<SumsByMethods>(std::move(group));
}

absl::Status all_reduce_by(Collectives& group, std::string_view label, float* input, float* output, std::size_t numel,
                           const ReduceOptions& options) {
  TESSERA_RETURN_IF_ERROR(options.method->sum(group, label, input, numel));
  if (output != input) std::memcpy(output, input, numel * sizeof(float));
  visit_sums(options.visitor, 0, output, numel);
  return absl::OkStatus();
}

absl::Status reduce_scatter_by(Collectives& group, std::string_view label, float* input, float* output,
                               std::size_t numel, const ReduceOptions& options) {
  TESSERA_RETURN_IF_ERROR(options.method->sum(group, label, input, numel * static_cast<std::size_t>(group.size())));
  const float* const own = input + static_cast<std::size_t>(group.rank()) * numel;
  if (output != own) std::memcpy(output, own, numel * sizeof(float));
  visit_sums(options.visitor, 0, output, numel);
  return absl::OkStatus();
}

}  // namespace tessera
