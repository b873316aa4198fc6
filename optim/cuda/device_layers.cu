// This file is compiled without contraction of a * b + c into one rounding, like the CPU's loops.

#include <math.h>

#include "optim/cuda/device_layers.h"
#include "optim/cuda/parameter_numbers.cuh"
#include "optim/trust_ratio.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr int kLayerThreads = 256;

/// Adds up the norms of parameters. One thread block runs this function; each thread handles one norm
/// of one parameter at a time.
__device__ void add_up_layers(const LayerTables& l) {
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(l.kinds) * l.parameters; i += kLayerThreads) {
    const unsigned kind = i / l.parameters, place = i % l.parameters;
    const std::uint32_t first = l.first_link[place];
    // Each kind of norm has its own stack.
    double* const stack = l.link_scratch + std::size_t{kind} * l.first_link[l.parameters] + first;
    l.squares[i] = add_up_nodes(l.links + first, l.first_link[place + 1] - first, stack, [&](const NormLink& link) {
      const auto message = static_cast<std::size_t>(l.part_ranks[link.part] * l.kinds) + kind;
      return l.messages[message * l.most_sums + link.slot];
    });
  }
}

/// Returns the trust ratio of a parameter. `place`: the index of the parameter among those of `l`.
__device__ double trust_ratio_of(const StepRequest& request, const LayerTables& l, const StepTables& t, unsigned place,
                                 const RuleNumbers& numbers) {
  double update = sqrt(l.kinds > 1 ? l.squares[l.parameters + place] : t.norm.squares[l.tensor[place]]);
  if (!makes_direction(request.rule)) update *= static_cast<double>(t.decision->gradient_scale);
  return trust_ratio(request.rule, numbers, request.trust_coefficient, sqrt(l.squares[place]), update);
}

/// One thread block runs this kernel.
__global__ void adapt(StepRequest request, LayerTables l, StepTables t) {
  add_up_layers(l);
  __syncthreads();
  if (t.decision->is_skipped) return;
  const bool has_direction = makes_direction(request.rule);
  for (unsigned place = threadIdx.x; place < l.parameters; place += kLayerThreads) {
    const unsigned p = l.first_parameter + place;
    if (!t.used[p]) continue;
    const GroupNumbers* const group = group_of(t, p);
    const RuleNumbers& numbers = group ? group->numbers : request.numbers;
    float rate = rate_of(t, p, t.decision->lr);
    if (!group || group->adapts_layers) {
      rate = static_cast<float>(rate * trust_ratio_of(request, l, t, place, numbers));
    }
    t.constants[p] = has_direction ? rule_constants(StepRule::kSgd, RuleNumbers{}, t.steps[p], rate)
                                   : rule_constants(request.rule, numbers, t.steps[p], rate);
  }
  for (unsigned i = threadIdx.x; i < l.groups; i += kLayerThreads) {
    const unsigned g = l.first_group + i;
    if (t.group[g].parameters > 1) t.is_uniform[g] = 0;
  }
}

}  // namespace

cudaError_t adapt_rates(const StepRequest& request, const LayerTables& layers, const StepTables& tables,
                        cudaStream_t stream) {
  return launch(adapt, 1, kLayerThreads, stream, request, layers, tables);
}

}  // namespace tessera::cuda
