// This file makes the optimizer's step on a GPU. It is compiled without contraction of a * b + c into one rounding,
// like the CPU's loops.
//
// Three small kernels prepare a step; each has one thread block. `read` adds up the ranks' messages. `decide` makes the
// decision and computes each parameter's constants. `begin_update` does the work of both for one unit while backward
// runs. The kernels for a run of elements follow. They have as many thread blocks as are useful (launch_over): `update`
// for a rule, `move_momenta` for Muon, `assign_masters`, `read_masters` and `swap`. All of them process the run in
// blocks of 256 elements, one block per warp (device_runs.cuh). `update` copies 8-bit blocks ahead (staged_blocks.cuh).
// `Update::elements` is the work of a rule on a thread's elements. `kernel_of` chooses the instance by rule, weight
// format and state dtype, outside the kernels.

#include <math.h>

#include <algorithm>

#include "optim/arithmetic/average_element.h"
#include "optim/arithmetic/scaled_gradient.h"
#include "optim/arithmetic/weighted_mean.h"
#include "optim/cuda/device_step.h"
#include "optim/cuda/parameter_numbers.cuh"
#include "optim/cuda/rule_states.cuh"
#include "optim/cuda/staged_blocks.cuh"
#include "runtime/base/cuda_launch.h"
#include "runtime/base/noise.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
// The number of thread blocks that a multiprocessor of the GPU can run at once, given the registers that an update
// needs. A large launch has many times as many thread blocks. Thread blocks that run at the same time then work on
// neighbouring memory. Multiprocessors are not equally fast, but finish a large launch at about the same time.
constexpr int kResidentBlocks = 3;
constexpr int kMostRounds = 40;
// The smallest number of blocks of 256 elements that a warp handles, if there are enough blocks. A warp that handles
// more blocks reads ahead, and its set-up costs less for each block.
constexpr int kLeastTurns = 8;

/// Writes the loss and the weight of the step: sums over all microbatches in the pairwise tree (SumCounter), as
/// sum_of_losses computes them on the CPU. Sums are kept on a stack. Two sums over the same number of microbatches are
/// added to one sum.
__device__ void add_up_losses(const StepTables& t, StepDecision& d) {
  constexpr int kMostWaiting = 64;
  MicrobatchLoss sums[kMostWaiting];
  int waiting = 0;
  const auto join = [&] {
    --waiting;
    sums[waiting - 1].loss += sums[waiting].loss;
    sums[waiting - 1].weight += sums[waiting].weight;
  };
  const std::int64_t all = std::int64_t{t.ranks} * t.rounds;
  for (std::int64_t i = 0; i < all; ++i) {
    const int rank = static_cast<int>(i / t.rounds);
    sums[waiting++] = part_of_message<MicrobatchLoss>(t.messages, rank, t.messages.losses_offset)[i % t.rounds];
    for (std::int64_t made = i + 1; made % 2 == 0; made /= 2) join();
  }
  while (waiting > 1) join();
  d.loss = sums[0].loss / static_cast<double>(all);
  d.weight = sums[0].weight;
}

/// One thread block runs this kernel.
__global__ void read(StepTables t) {
  for (unsigned p = threadIdx.x; p < static_cast<unsigned>(t.parameters); p += blockDim.x) {
    t.used[p] = is_used_by_any(t.messages, t.ranks, p) ? 1 : 0;
  }
  if (threadIdx.x > 0) return;
  StepDecision& d = *t.decision;
  AgreedSums sums;
  OwnGradients own;
  if (!t.updates_in_backward) d.gathers_differ = d.numbers_differ = 0;
  for (int rank = 0; rank < t.ranks; ++rank) {
    add_message(t.messages, rank, t.ranks, sums, own);
    const StepMessageHeader& header = header_of_message(t.messages, rank);
    if (header.gathers != header_of_message(t.messages, rank - rank % t.shard_size).gathers) d.gathers_differ = 1;
    if (header.numbers != header_of_message(t.messages, 0).numbers && d.numbers_differ == 0) d.numbers_differ = rank;
  }
  static_cast<AgreedSums&>(d) = sums;
  d.own = own;
  if (t.rounds > 0) add_up_losses(t, d);
}

/// Writes the two losses in the middle of a full window to `middle`, the smaller loss first. One thread block runs this
/// function. Each thread finds, for some of the losses, the position in the order of size.
__device__ void find_middle(const double* losses, int window, double* middle) {
  for (int i = static_cast<int>(threadIdx.x); i < window; i += static_cast<int>(blockDim.x)) {
    int before = 0;
    for (int k = 0; k < window; ++k) before += losses[k] < losses[i] || (losses[k] == losses[i] && k < i) ? 1 : 0;
    if (before == (window - 1) / 2) middle[0] = losses[i];
    if (before == window / 2) middle[1] = losses[i];
  }
}

/// Returns the facts about the step, for verdict_on. Every thread returns the same facts.
__device__ StepFacts facts_of(const StepRequest& request, const StepTables& t, double median) {
  const StepDecision& d = *t.decision;
  StepFacts facts;
  facts.sum_of_squares = *t.norm.sum_of_squares;
  facts.loss_scale = d.scaler.scale;
  facts.lr_ratio = request.lr_ratios[d.so_far.skipped - request.known_skipped];
  facts.median = median;
  return facts;
}

/// Returns the constants of a parameter, computed from the numbers and the rate of its group.
__device__ RuleConstants constants_of(const StepRequest& request, const StepTables& t, unsigned p, double lr) {
  const bool is_matrix = t.is_matrix && t.is_matrix[p] != 0;
  const GroupNumbers* const group = group_of(t, p);
  const RuleNumbers& numbers =
      group ? (is_matrix ? group->of_matrices : group->numbers) : (is_matrix ? request.of_matrices : request.numbers);
  return rule_constants(is_matrix ? StepRule::kSgd : request.rule, numbers, t.steps[p], rate_of(t, p, lr));
}

__device__ bool is_of_one_kind(const StepTables& t, unsigned p, unsigned q) {
  return t.steps[p] == t.steps[q] && (!t.group_number || t.group_number[p] == t.group_number[q]);
}

/// Counts a step for those of the parameters [begin, end) that this step uses, and computes their constants. One thread
/// block runs this function.
__device__ void count_step(const StepRequest& request, const StepTables& t, unsigned begin, unsigned end, double lr) {
  for (unsigned p = begin + threadIdx.x; p < end; p += blockDim.x) {
    if (!t.used[p]) continue;
    ++t.steps[p];
    t.constants[p] = constants_of(request, t, p, lr);
  }
}

/// Finds, for each of the groups [begin, end), whether all its parameters are used and of one kind (`is_uniform`). One
/// thread block runs this function. REQUIRES: all threads have finished `count_step`.
__device__ void find_uniform(const StepTables& t, unsigned begin, unsigned end) {
  for (unsigned g = begin + threadIdx.x; g < end; g += blockDim.x) t.is_uniform[g] = 1;
  __syncthreads();
  for (unsigned g = begin; g < end; ++g) {
    const StepGroup group = t.group[g];
    for (unsigned i = threadIdx.x; i < group.parameters; i += blockDim.x) {
      const unsigned p = group.first_parameter + i;
      if (!t.used[p] || !is_of_one_kind(t, p, group.first_parameter)) t.is_uniform[g] = 0;
    }
  }
}

/// One thread block runs this kernel.
__global__ void begin_update(StepRequest request, UnitRequest unit, StepTables t) {
  __shared__ int differs, is_infinite;
  if (threadIdx.x == 0) differs = is_infinite = 0;
  const bool is_over = t.decision->is_skipped != 0;
  __syncthreads();  // all threads have read the decision before it is overwritten
  for (unsigned i = threadIdx.x; i < unit.digest_bits; i += blockDim.x) {
    if (unit.differ[i] != 0.0f) differs = 1;
  }
  for (unsigned i = threadIdx.x; i < unit.sum_count; i += blockDim.x) {
    if (!isfinite(unit.sums[i])) is_infinite = 1;
  }
  __syncthreads();
  StepDecision& d = *t.decision;
  const std::int64_t samples = unit.samples != nullptr ? llround(static_cast<double>(*unit.samples)) : 0;
  const double lr = rate_at(request, d, request.lr_ratios[0], samples);
  if (is_over || differs != 0 || is_infinite != 0) {
    if (threadIdx.x > 0 || is_over) return;
    d.is_skipped = 1;
    if (differs != 0) d.gathers_differ = 1;
    if (is_infinite != 0) d.not_finite_unit = unit.unit + 1;
    return;
  }
  if (threadIdx.x == 0) {
    d.gradient_scale = static_cast<float>(mean_factor(*unit.weight, 1.0));
    d.lr = lr;
  }
  for (unsigned i = threadIdx.x; i < unit.parameters; i += blockDim.x) {
    t.used[unit.first_parameter + i] = unit.used[i] > 0.0f ? 1 : 0;
  }
  __syncthreads();
  count_step(request, t, unit.first_parameter, unit.first_parameter + unit.parameters, lr);
  __syncthreads();
  find_uniform(t, unit.first_group, unit.first_group + unit.groups);
}

/// One thread block runs this kernel.
__global__ void decide(StepRequest request, StepTables t) {
  __shared__ double middle[2];
  const int window = request.spikes.window;
  const bool is_full = window > 0 && t.decision->spikes.count == window;
  if (is_full) find_middle(t.losses, window, middle);
  __syncthreads();
  const double median = is_full ? median_between(middle[0], middle[1]) : 0.0;
  const StepFacts facts = facts_of(request, t, median);
  const Verdict v = verdict_on(request, *t.decision, facts);
  const bool was_over = t.updates_in_backward && t.decision->is_skipped != 0;
  __syncthreads();  // all threads have read the decision before it is overwritten
  if (threadIdx.x == 0) take_verdict(request, facts, v, was_over, t.losses, *t.decision);
  if (v.is_skipped || was_over || t.updates_in_backward) return;
  count_step(request, t, 0, static_cast<unsigned>(t.parameters), v.lr);
  __syncthreads();
  find_uniform(t, 0, static_cast<unsigned>(t.groups));
}

/// Returns the parameter to which element `element` of the group belongs: the last parameter that begins at or before
/// the element.
__device__ std::uint32_t parameter_at(const DeviceRun& run, std::uint64_t element) {
  const std::uint64_t place = element / kParameterAlign;
  std::uint32_t low = 0, high = run.parameters;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (run.begins[middle].begin <= place ? low : high) = middle;
  }
  return run.begins[low].parameter;
}

/// Returns the index of the first element of this warp. Each further block of the warp begins all_warps() elements
/// after the block before it.
__device__ std::size_t first_of_warp() {
  return (std::size_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp * kStateBlock;
}
__device__ std::size_t all_warps() { return std::size_t{gridDim.x} * kThreads / kWarp * kStateBlock; }

/// Returns the way in which a parameter's average begins, if this step updates the parameter.
__device__ __forceinline__ AverageStart start_of_average(const StepTables& t, std::uint32_t parameter) {
  return average_start(t.steps[parameter], is_first_of_run(*t.decision, t.updates_in_backward));
}

/// Updates the averages of a thread's elements. `before`, `after`: the weights before and after the step.
__device__ __forceinline__ void average_run(const AverageArgument& a, std::size_t i, std::size_t left,
                                            AverageStart start, const Run<float>& before, const Run<float>& after) {
  Run<float> values = load_run(a.values + i, left);
  for_run([&](int k) {
    values.values[k] = average_element(values.values[k], before.values[k], after.values[k], a.share, start);
  });
  store_run(a.values + i, left, values);
}

/// The position of a thread's elements in a run.
struct Place {
  std::size_t i;     ///< index of the first element
  std::size_t left;  ///< number of elements of the run from the first element on
  const StepArguments& from;
  std::size_t at;  ///< index in `from` of the first element to read
};

/// The work of an update kernel for one rule and one set of formats.
template <class Rule, WeightFormat kWeights, StateDType kStates>
struct Update {
  using Constants = typename Rule::Constants;

  /// The numbers with which this step updates a parameter.
  struct Move {
    const Constants& c;
    const NoiseKey& key;
    std::uint32_t parameter;
    float scale;  ///< the gradient's scale
  };

  /// Computes this thread's part of the 256 elements of its warp. All threads of a warp must call this function
  /// together.
  static __device__ __forceinline__ void elements(const DeviceRun& run, const StepTables& t, const Move& move,
                                                  const Place& place) {
    const StepArguments& a = run.arguments;
    const Constants& c = move.c;
    const StepArguments& from = place.from;
    const std::size_t i = place.i, left = place.left, at = place.at;
    // All loads come before the first use, so that they run at the same time.
    const Run<float> gradient = load_run(from.gradient + at, left);
    const Run<float> weight = Weights<kWeights>::load(from, at, left);
    Run<float> states[Rule::kStates] = {};
    for_states<Rule>([&]<int s>() {
      using State = StateOf<Rule, kStates, s>;
      if (!State::is_kept(a)) return;
      states[s] = Moment<State::kDType>::template load<CodeOf<State::kCode>>(from.states[s], at, left);
    });
    Run<float> next_weight = {}, scaled;
    Run<std::uint32_t> noise = {};
    // If the limit is the constant 0, the compiler removes the clipping.
    for_run([&](int k) { scaled.values[k] = scaled_gradient(gradient.values[k], move.scale, 0.0f); });
    if (a.clip_value > 0.0f) {
      for_run([&](int k) { scaled.values[k] = scaled_gradient(gradient.values[k], move.scale, a.clip_value); });
    }
    for_run([&](int k) {
      float old[Rule::kStates];
#pragma unroll
      for (int s = 0; s < Rule::kStates; ++s) old[s] = states[s].values[k];
      const RuleElement<ScalarLane, Rule::kStates> next =
          Rule::template element<ScalarLane>(c, scaled.values[k], weight.values[k], static_cast<const float*>(old));
      next_weight.values[k] = next.weight;
      for_states<Rule>(
          [&]<int s>() { states[s].values[k] = StateOf<Rule, kStates, s>::kKeepsRoot ? next.root : next.states[s]; });
      if constexpr (kStates != StateDType::kF32) {
        const auto element = static_cast<std::uint32_t>(run.first_element + i + offset_of(k));
        noise.values[k] = noise_at(move.key, element * kNoiseStride);
      }
      if constexpr (kStates == StateDType::kBF16) {  // States::spare_nans
        for_states<Rule>([&]<int s>() {
          using State = StateOf<Rule, kStates, s>;
          const float value = states[s].values[k];
          if (State::kDType == StateDType::kBF16 && State::is_kept(a) && value != value) noise.values[k] = 0;
        });
      }
    });
    if constexpr (kIsOfDirections<Rule>) {
      store_run(run.direction + i, left, next_weight);
    } else {
      Weights<kWeights>::store(a, i, left, next_weight);
    }
    if (a.average.values != nullptr) {
      average_run(a.average, i, left, start_of_average(t, move.parameter), weight, next_weight);
    }
    for_states<Rule>([&]<int s>() {
      using State = StateOf<Rule, kStates, s>;
      if (!State::is_kept(a)) return;
      using Code = CodeOf<State::kCode>;
      Run<std::uint32_t> own = {};
      if constexpr (State::kDType != StateDType::kF32) {
        constexpr int kBits = Moment<State::kDType>::template kNoiseBits<Code>;
        for_run([&](int k) { own.values[k] = own_noise<s == 0, kBits>(noise.values[k]); });
      }
      Moment<State::kDType>::template store<Code>(a.states[s], i, left, states[s], own);
    });
  }
};

/// Calls `body(constants)`. Inside `body` the flags that choose between two formulas are constants for the compiler, so
/// only one of the formulas is computed for an element.
template <class Constants, class Body>
__device__ __forceinline__ void with_known_formula(const Constants& c, const Body& body) {
  if constexpr (requires { c.decoupled; }) {
    if (c.frozen) return body(c);
    Constants known = c;
    known.frozen = false;
    known.decoupled = true;
    if (c.decoupled) return body(known);
    known.decoupled = false;
    return body(known);
  } else {
    return body(c);
  }
}

template <class Rule, WeightFormat kWeights, StateDType kStates>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) update(DeviceRun run, StepTables t) {
  if (t.decision->is_skipped) return;
  const StepArguments& a = run.arguments;
  const float scale = run.takes_direction ? 1.0f : t.decision->gradient_scale;
  const bool is_uniform = t.is_uniform[run.group] != 0;
  std::uint32_t parameter = run.begins[0].parameter;
  typename Rule::Constants c = constants_for(t.constants[parameter], Rule{});
  NoiseKey key = noise_key(run.stream, t.steps[parameter]);
  using Blocks = BlocksOf<Rule, kWeights, kStates, kThreads / kWarp>;
  Blocks blocks(a, first_of_warp());
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    blocks.move_on(a, begin + all_warps());
    if (!is_uniform) {
      // A thread's elements belong to one parameter; with 8-bit states, all elements of a warp belong to one parameter.
      parameter = parameter_at(run, run.first_element + (kStates == StateDType::k8Bit ? begin : i));
      if (!t.used[parameter]) {
        if (a.average.values == nullptr || t.steps[parameter] == 0) continue;
        const Run<float> weight = Weights<kWeights>::load(a, i, left);
        average_run(a.average, i, left, AverageStart::kGoesOn, weight, weight);
        continue;
      }
      c = constants_for(t.constants[parameter], Rule{});
      key = noise_key(run.stream, t.steps[parameter]);
    }
    // If all elements exist, `left` is a constant, and the compiler removes the check of each element.
    using Elements = Update<Rule, kWeights, kStates>;
    if (a.numel - begin < kStateBlock) {
      Elements::elements(run, t, {c, key, parameter, scale}, {i, left, a, i});
    } else if constexpr (Blocks::kAreStaged) {
      with_known_formula(c, [&](const typename Rule::Constants& known) {
        Elements::elements(run, t, {known, key, parameter, scale}, {i, kStateBlock, blocks.current(), first_in_warp()});
      });
    } else {
      Elements::elements(run, t, {c, key, parameter, scale}, {i, kStateBlock, a, i});
    }
  }
}

/// Updates momenta, and writes directions over the run's weights.
template <StateDType kStates>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    move_momenta(DeviceRun run, MuonMomentumConstants c, StepTables t) {
  if (t.decision->is_skipped) return;
  const StepArguments& a = run.arguments;
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    const std::uint32_t parameter = parameter_at(run, run.first_element + (kStates == StateDType::k8Bit ? begin : i));
    if (!t.used[parameter]) continue;
    Update<MuonMomentumRule, WeightFormat::kF32, kStates>::elements(
        run, t, {c, noise_key(run.stream, t.steps[parameter]), parameter, t.decision->gradient_scale}, {i, left, a, i});
  }
}

template <WeightFormat kWeights>
__global__ void __launch_bounds__(kThreads) swap(DeviceRun run, StepTables t) {
  const StepArguments& a = run.arguments;
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    if (t.steps[parameter_at(run, run.first_element + i)] == 0) continue;
    const Run<float> weight = Weights<kWeights>::load(a, i, left);
    Weights<kWeights>::store(a, i, left, load_run(a.average.values + i, left));
    store_run(a.average.values + i, left, weight);
  }
}

template <WeightFormat kWeights>
__global__ void __launch_bounds__(kThreads) read_masters(DeviceRun run, float* masters) {
  const StepArguments& a = run.arguments;
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    store_run(masters + i, left, Weights<kWeights>::load(a, i, left));
  }
}

template <WeightFormat kWeights>
__global__ void __launch_bounds__(kThreads) assign_masters(DeviceRun run, StepTables t) {
  if (t.decision->is_skipped) return;
  const StepArguments& a = run.arguments;
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    const std::uint32_t parameter = parameter_at(run, run.first_element + i);
    const Run<float> before = Weights<kWeights>::load(a, i, left);
    const bool is_used = t.used[parameter] != 0;
    const Run<float> after = is_used ? load_run(a.gradient + i, left) : before;
    if (is_used) Weights<kWeights>::store(a, i, left, after);
    if (a.average.values == nullptr || t.steps[parameter] == 0) continue;
    average_run(a.average, i, left, is_used ? start_of_average(t, parameter) : AverageStart::kGoesOn, before, after);
  }
}

using Kernel = void (*)(DeviceRun, StepTables);
using ReadKernel = void (*)(DeviceRun, float*);

template <class Rule, WeightFormat kWeights>
Kernel kernel_with(StateDType states) {
  switch (states) {
    case StateDType::kF32:
      return update<Rule, kWeights, StateDType::kF32>;
    case StateDType::kBF16:
      return update<Rule, kWeights, StateDType::kBF16>;
    case StateDType::k8Bit:
      return update<Rule, kWeights, StateDType::k8Bit>;
  }
  return nullptr;
}

/// Calls `kernel.template operator()<weights>()` for the format of a run's weights.
template <class KernelWith>
auto for_weights(WeightFormat weights, const KernelWith& kernel)
    -> decltype(kernel.template operator()<WeightFormat::kF32>()) {
  switch (weights) {
    case WeightFormat::kF32:
      return kernel.template operator()<WeightFormat::kF32>();
    case WeightFormat::kF32AndF32:
      return kernel.template operator()<WeightFormat::kF32AndF32>();
    case WeightFormat::kF32AndBF16:
      return kernel.template operator()<WeightFormat::kF32AndBF16>();
    case WeightFormat::kF32AndF16:
      return kernel.template operator()<WeightFormat::kF32AndF16>();
    case WeightFormat::kSplitBF16:
      return kernel.template operator()<WeightFormat::kSplitBF16>();
  }
  return nullptr;
}

template <class Rule>
Kernel kernel_on(const StepArguments& a) {
  return for_weights(a.weights, [&]<WeightFormat kWeights>() { return kernel_with<Rule, kWeights>(a.state_dtype); });
}

Kernel kernel_of(StepRule rule, const StepArguments& a) {
  return with_rule(rule, [&]<class Rule>() { return kernel_on<Rule>(a); });
}

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// Returns whether all memory is aligned to 16 bytes, which load_run and store_run require for four fp32 elements.
bool aligned(const StepArguments& a) {
  for (const StateArgument& state : a.states) {
    if (!aligned(state.data, 16)) return false;
  }
  return aligned(a.gradient, 16) && aligned(a.master, 16) && aligned(a.low, 16) && aligned(a.parameter, 16) &&
         aligned(a.average.values, 16);
}

}  // namespace

cudaError_t read_messages(const StepTables& tables, cudaStream_t stream) {
  return launch(read, 1, kThreads, stream, tables);
}

cudaError_t begin_unit(const StepRequest& request, const UnitRequest& unit, const StepTables& tables,
                       cudaStream_t stream) {
  return launch(begin_update, 1, kThreads, stream, request, unit, tables);
}

cudaError_t decide_step(const StepRequest& request, const StepTables& tables, cudaStream_t stream) {
  return launch(decide, 1, kThreads, stream, request, tables);
}

namespace {

/// Calls `launch_blocks(blocks)` with as many blocks as are useful for the run.
template <class Launch>
cudaError_t launch_over(const DeviceRun& run, unsigned most_blocks, const Launch& launch_blocks) {
  const StepArguments& a = run.arguments;
  if (a.numel == 0) return cudaSuccess;
  if (!aligned(a) || run.first_element % kParameterAlign != 0) return cudaErrorMisalignedAddress;
  int count = 0;
  if (const cudaError_t error = multiprocessors(count); error != cudaSuccess) return error;
  const std::size_t needed = (a.numel + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  const std::size_t room = std::size_t(count) * kResidentBlocks;
  const std::size_t useful = std::min(needed, std::clamp(needed / kLeastTurns, room, room * kMostRounds));
  return launch_blocks(static_cast<unsigned>(std::min<std::size_t>(useful, most_blocks)));
}

cudaError_t launch_over(Kernel kernel, const DeviceRun& run, const StepTables& tables, cudaStream_t stream,
                        unsigned most_blocks) {
  return launch_over(run, most_blocks, [&](unsigned blocks) {
    if (kernel == nullptr) return cudaErrorInvalidValue;
    return launch(kernel, blocks, kThreads, stream, run, tables);
  });
}

}  // namespace

cudaError_t muon_directions(const DeviceRun& run, const MuonMomentumConstants& constants, const StepTables& tables,
                            cudaStream_t stream) {
  using DirectionKernel = void (*)(DeviceRun, MuonMomentumConstants, StepTables);
  DirectionKernel kernel = move_momenta<StateDType::kF32>;
  if (run.arguments.state_dtype == StateDType::kBF16) kernel = move_momenta<StateDType::kBF16>;
  if (run.arguments.state_dtype == StateDType::k8Bit) kernel = move_momenta<StateDType::k8Bit>;
  return launch_over(run, kAnyBlocks,
                     [&](unsigned blocks) { return launch(kernel, blocks, kThreads, stream, run, constants, tables); });
}

cudaError_t update_step(const DeviceRun& run, const StepTables& tables, cudaStream_t stream, unsigned most_blocks) {
  if (makes_direction(run.rule) && !aligned(run.direction, 16)) return cudaErrorMisalignedAddress;
  return launch_over(kernel_of(run.rule, run.arguments), run, tables, stream, most_blocks);
}

cudaError_t read_weights(const DeviceRun& run, float* masters, cudaStream_t stream) {
  const ReadKernel kernel =
      for_weights(run.arguments.weights, [&]<WeightFormat kWeights>() -> ReadKernel { return read_masters<kWeights>; });
  return launch_over(run, kAnyBlocks,
                     [&](unsigned blocks) { return launch(kernel, blocks, kThreads, stream, run, masters); });
}

cudaError_t assign_weights(const DeviceRun& run, const StepTables& tables, cudaStream_t stream) {
  const Kernel kernel =
      for_weights(run.arguments.weights, [&]<WeightFormat kWeights>() -> Kernel { return assign_masters<kWeights>; });
  return launch_over(kernel, run, tables, stream, kAnyBlocks);
}

cudaError_t swap_averages(const DeviceRun& run, const StepTables& tables, cudaStream_t stream) {
  const Kernel kernel =
      for_weights(run.arguments.weights, [&]<WeightFormat kWeights>() -> Kernel { return swap<kWeights>; });
  return launch_over(kernel, run, tables, stream, kAnyBlocks);
}

}  // namespace tessera::cuda
