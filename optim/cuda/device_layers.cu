// This file is compiled without contraction of a * b + c into one rounding, like the CPU's loops.

#include <math.h>

#include "optim/cuda/device_layers.h"
#include "optim/cuda/parameter_numbers.cuh"
#include "optim/trust_ratio.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr int kLayerThreads = 256;

/// One thread block runs this; each thread takes a tensor.
__device__ void add_up_layers(const LayerTables& l, const StepTables& t) {
  for (int i = static_cast<int>(threadIdx.x); i < l.kinds * t.tensors; i += kLayerThreads) {
    const int kind = i / t.tensors, tensor = i % t.tensors;
    const std::uint32_t first = l.first_link[tensor];
    // Each kind of norm has its own stack.
    double* const stack = l.link_scratch + static_cast<std::size_t>(kind) * l.first_link[t.tensors] + first;
    l.squares[i] = add_up_nodes(l.links + first, l.first_link[tensor + 1] - first, stack, [&](const NormLink& link) {
      const auto message = static_cast<std::size_t>(l.part_ranks[link.part] * l.kinds + kind);
      return l.messages[message * l.most_sums + link.slot];
    });
  }
}

__device__ double trust_ratio_of(const StepRequest& request, const LayerTables& l, const StepTables& t, unsigned p,
                                 const RuleNumbers& numbers) {
  const std::uint32_t tensor = l.tensor[p];
  const double update = makes_direction(request.rule)
                            ? sqrt(l.squares[static_cast<std::size_t>(t.tensors) + tensor])
                            : sqrt(t.squares[tensor]) * static_cast<double>(t.decision->gradient_scale);
  return trust_ratio(request.rule, numbers, request.trust_coefficient, sqrt(l.squares[tensor]), update);
}

/// One thread block runs this kernel.
__global__ void adapt(StepRequest request, LayerTables l, StepTables t) {
  add_up_layers(l, t);
  __syncthreads();
  if (t.decision->is_skipped) return;
  const bool has_direction = makes_direction(request.rule);
  for (unsigned p = threadIdx.x; p < static_cast<unsigned>(t.parameters); p += kLayerThreads) {
    if (!t.used[p]) continue;
    const GroupNumbers* const group = group_of(t, p);
    const RuleNumbers& numbers = group ? group->numbers : request.numbers;
    float rate = rate_of(t, p, t.decision->lr);
    if (!group || group->adapts_layers) {
      rate = static_cast<float>(rate * trust_ratio_of(request, l, t, p, numbers));
    }
    t.constants[p] = has_direction ? rule_constants(StepRule::kSgd, RuleNumbers{}, t.steps[p], rate)
                                   : rule_constants(request.rule, numbers, t.steps[p], rate);
  }
  for (unsigned g = threadIdx.x; g < static_cast<unsigned>(t.groups); g += kLayerThreads) {
    if (t.group[g].parameters > 1) t.is_uniform[g] = 0;
  }
}

}  // namespace

cudaError_t adapt_rates(const StepRequest& request, const LayerTables& layers, const StepTables& tables,
                        cudaStream_t stream) {
  return launch(adapt, 1, kLayerThreads, stream, request, layers, tables);
}

}  // namespace tessera::cuda
