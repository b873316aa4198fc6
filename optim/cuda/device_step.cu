// Compiled without contraction of a * b + c into one rounding, like the CPU's loops.

#include <math.h>

#include <algorithm>

#include "optim/adam_element.h"
#include "optim/clip.h"
#include "optim/cuda/device_runs.cuh"
#include "optim/cuda/device_step.h"
#include "optim/noise.h"
#include "optim/scaled_lr.h"
#include "optim/sgd_element.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;

__device__ const StepMessageHeader& header_of(const StepTables& t, int rank) {
  return *reinterpret_cast<const StepMessageHeader*>(t.messages + t.message_bytes * static_cast<std::size_t>(rank));
}

__device__ const std::uint8_t* flags_of(const StepTables& t, int rank) {
  return reinterpret_cast<const std::uint8_t*>(&header_of(t, rank) + 1);
}

/// One thread block.
__global__ void read(StepTables t) {
  for (unsigned p = threadIdx.x; p < static_cast<unsigned>(t.parameters); p += blockDim.x) {
    unsigned used = 0;
    for (int rank = 0; rank < t.ranks; ++rank) used |= flags_of(t, rank)[p];
    t.used[p] = static_cast<std::uint8_t>(used);
  }
  if (threadIdx.x > 0) return;
  DeviceDecision& d = *t.decision;
  d.loss = 0.0;
  d.tokens = d.samples = 0;
  d.gathers_differ = 0;
  for (int rank = 0; rank < t.ranks; ++rank) {
    const StepMessageHeader& header = header_of(t, rank);
    d.loss += header.loss / t.ranks;
    d.tokens += header.tokens;
    d.samples += header.samples;
    if (header.gathers != header_of(t, rank - rank % t.shard_size).gathers) d.gathers_differ = 1;
  }
}

/// What the step does, from what was read; the same for every thread.
struct Verdict {
  double norm, lr;
  float gradient_scale;
  bool is_overflow, is_skipped;
};

__device__ Verdict verdict_on(const StepRequest& request, const StepTables& t) {
  const DeviceDecision& d = *t.decision;
  const double mean = 1.0 / (request.microbatches * d.scaler.scale);
  Verdict v;
  v.norm = sqrt(*t.sum_of_squares) * mean;
  v.is_overflow = !isfinite(*t.sum_of_squares);
  v.is_skipped = v.is_overflow || d.gathers_differ != 0;
  v.gradient_scale = static_cast<float>(mean * clip_factor(v.norm, request.max_norm));
  const double ratio = request.lr_ratios[d.skipped - request.known_skipped];
  v.lr = scaled_lr(request.base_lr, request.base_batch_size, d.samples, ratio);
  return v;
}

/// One thread block.
__global__ void decide(StepRequest request, StepTables t) {
  const Verdict v = verdict_on(request, t);
  __syncthreads();  // all have read the decision before one writes it
  if (threadIdx.x == 0) {
    DeviceDecision& d = *t.decision;
    d.grad_norm = v.norm;
    d.lr = v.lr;
    d.gradient_scale = v.gradient_scale;
    d.loss_scale = d.scaler.scale;
    d.is_overflow = v.is_overflow ? 1 : 0;
    d.is_skipped = v.is_skipped ? 1 : 0;
    d.applied += v.is_skipped ? 0 : 1;
    d.skipped += v.is_skipped ? 1 : 0;
    next_loss_scale(request.loss_scale, d.scaler, v.is_overflow);
    if (request.rule == StepRule::kSgd) {
      *t.sgd = request.sgd;
      t.sgd->gradient_scale = v.gradient_scale;
      t.sgd->lr = static_cast<float>(v.lr);
    }
  }
  if (v.is_skipped) return;
  for (unsigned p = threadIdx.x; p < static_cast<unsigned>(t.parameters); p += blockDim.x) {
    if (!t.used[p]) continue;
    ++t.steps[p];
    if (request.rule == StepRule::kSgd) continue;
    t.constants[p] = adam_constants(request.adam, t.steps[p], static_cast<float>(v.lr), v.gradient_scale);
  }
  __syncthreads();
  for (unsigned g = threadIdx.x; g < static_cast<unsigned>(t.groups); g += blockDim.x) t.is_uniform[g] = 1;
  __syncthreads();
  for (int g = 0; g < t.groups; ++g) {
    const StepGroup group = t.group[g];
    for (unsigned i = threadIdx.x; i < group.parameters; i += blockDim.x) {
      const unsigned p = group.first_parameter + i;
      if (!t.used[p] || t.steps[p] != t.steps[group.first_parameter]) t.is_uniform[g] = 0;
    }
  }
}

/// The parameter that element `element` of the group belongs to: the last that does not begin behind it.
__device__ std::uint32_t parameter_at(const DeviceRun& run, std::uint64_t element) {
  const std::uint64_t place = element / kParameterAlign;
  std::uint32_t low = 0, high = run.parameters;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (run.begins[middle].begin <= place ? low : high) = middle;
  }
  return run.begins[low].parameter;
}

/// The byte that a code is kept in.
struct FirstCode : SignedBlockCode<ScalarLane> {
  using Byte = std::int8_t;
};
struct SecondCode : RootBlockCode<ScalarLane> {
  using Byte = std::uint8_t;
};

/// The elements of this warp begin here, and then so many later each time.
__device__ std::size_t first_of_warp() {
  return (std::size_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp * kStateBlock;
}
__device__ std::size_t all_warps() { return std::size_t{gridDim.x} * kThreads / kWarp * kStateBlock; }

template <WeightFormat kWeights, StateDType kStates>
__global__ void __launch_bounds__(kThreads) adam(DeviceRun run, StepTables t) {
  if (t.decision->is_skipped) return;
  const StepArguments& a = run.arguments;
  const bool is_uniform = t.is_uniform[run.group] != 0;
  std::uint32_t parameter = run.begins[0].parameter;
  AdamConstants c = t.constants[parameter];
  NoiseKey key = noise_key(run.stream, t.steps[parameter]);
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    if (!is_uniform) {
      // A thread's elements belong to one parameter; with 8-bit states, a warp's do.
      parameter = parameter_at(run, run.first_element + (kStates == StateDType::k8Bit ? begin : i));
      if (!t.used[parameter]) continue;
      c = t.constants[parameter];
      key = noise_key(run.stream, t.steps[parameter]);
    }
    // All loads before the first use, so that they are under way together.
    const Run<float> gradient = load_run(a.gradient + i, left);
    Run<float> weight = Weights<kWeights>::load(a, i, left);
    Run<float> first = Moment<kStates>::template load<FirstCode>(a.state0, i, left);
    Run<float> second = Moment<kStates>::template load<SecondCode>(a.state1, i, left);
    Run<std::uint32_t> first_noise = {}, second_noise = {};
    for_run([&](int k) {
      const AdamElement<ScalarLane> next =
          adam_element<ScalarLane>(c, gradient.values[k], weight.values[k], first.values[k], second.values[k]);
      weight.values[k] = next.weight;
      first.values[k] = next.first;
      second.values[k] = kStates == StateDType::k8Bit ? next.root : next.second;
      if constexpr (kStates != StateDType::kF32) {
        const auto element = static_cast<std::uint32_t>(run.first_element + i + offset_of(k));
        const std::uint32_t noise = noise_at(key, element * kNoiseStride);
        first_noise.values[k] = noise & 0xffffu;
        second_noise.values[k] = noise >> 16;
      }
    });
    Weights<kWeights>::store(a, i, left, weight);
    Moment<kStates>::template store<FirstCode>(a.state0, i, left, first, first_noise);
    Moment<kStates>::template store<SecondCode>(a.state1, i, left, second, second_noise);
  }
}

/// 8-bit momentum does not exist: Sgd refuses it.
template <WeightFormat kWeights, StateDType kStates>
__global__ void __launch_bounds__(kThreads) sgd(DeviceRun run, StepTables t) {
  if (t.decision->is_skipped) return;
  const StepArguments& a = run.arguments;
  const bool is_uniform = t.is_uniform[run.group] != 0;
  std::uint32_t parameter = run.begins[0].parameter;
  SgdConstants c = *t.sgd;
  c.first_step = t.steps[parameter] <= 1;
  NoiseKey key = noise_key(run.stream, t.steps[parameter]);
  for (std::size_t begin = first_of_warp(); begin < a.numel; begin += all_warps()) {
    const std::size_t i = begin + first_in_warp();
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    if (!is_uniform) {
      parameter = parameter_at(run, run.first_element + i);
      if (!t.used[parameter]) continue;
      c.first_step = t.steps[parameter] <= 1;
      key = noise_key(run.stream, t.steps[parameter]);
    }
    const Run<float> gradient = load_run(a.gradient + i, left);
    Run<float> weight = Weights<kWeights>::load(a, i, left);
    Run<float> buffer = {};
    if (c.has_momentum && !c.first_step) buffer = Moment<kStates>::template load<FirstCode>(a.state0, i, left);
    Run<std::uint32_t> noise = {};
    for_run([&](int k) {
      const SgdElement<ScalarLane> next =
          sgd_element<ScalarLane>(c, gradient.values[k], weight.values[k], buffer.values[k]);
      weight.values[k] = next.weight;
      buffer.values[k] = next.buffer;
      if constexpr (kStates != StateDType::kF32) {
        const auto element = static_cast<std::uint32_t>(run.first_element + i + offset_of(k));
        noise.values[k] = noise_at(key, element * kNoiseStride) & 0xffffu;
      }
    });
    Weights<kWeights>::store(a, i, left, weight);
    if (c.has_momentum) Moment<kStates>::template store<FirstCode>(a.state0, i, left, buffer, noise);
  }
}

using Kernel = void (*)(DeviceRun, StepTables);

template <WeightFormat kWeights>
Kernel adam_on(StateDType states) {
  switch (states) {
    case StateDType::kF32:
      return adam<kWeights, StateDType::kF32>;
    case StateDType::kBF16:
      return adam<kWeights, StateDType::kBF16>;
    case StateDType::k8Bit:
      return adam<kWeights, StateDType::k8Bit>;
  }
  return nullptr;
}

template <WeightFormat kWeights>
Kernel sgd_on(StateDType states) {
  switch (states) {
    case StateDType::kF32:
      return sgd<kWeights, StateDType::kF32>;
    case StateDType::kBF16:
      return sgd<kWeights, StateDType::kBF16>;
    case StateDType::k8Bit:
      return nullptr;
  }
  return nullptr;
}

template <WeightFormat kWeights>
Kernel kernel_on(StepRule rule, StateDType states) {
  return rule == StepRule::kAdam ? adam_on<kWeights>(states) : sgd_on<kWeights>(states);
}

Kernel kernel_of(StepRule rule, const StepArguments& a) {
  switch (a.weights) {
    case WeightFormat::kF32:
      return kernel_on<WeightFormat::kF32>(rule, a.states);
    case WeightFormat::kF32AndF32:
      return kernel_on<WeightFormat::kF32AndF32>(rule, a.states);
    case WeightFormat::kF32AndBF16:
      return kernel_on<WeightFormat::kF32AndBF16>(rule, a.states);
    case WeightFormat::kF32AndF16:
      return kernel_on<WeightFormat::kF32AndF16>(rule, a.states);
    case WeightFormat::kSplitBF16:
      return kernel_on<WeightFormat::kSplitBF16>(rule, a.states);
  }
  return nullptr;
}

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// As load_run and store_run demand, and more: a sector lies on its own only then.
bool aligned(const StepArguments& a) {
  return aligned(a.gradient, 16) && aligned(a.master, 16) && aligned(a.low, 16) && aligned(a.parameter, 16) &&
         aligned(a.state0.data, 16) && aligned(a.state1.data, 16);
}

}  // namespace

cudaError_t read_messages(const StepTables& tables, cudaStream_t stream) {
  return launch(read, 1, kThreads, stream, tables);
}

cudaError_t decide_step(const StepRequest& request, const StepTables& tables, cudaStream_t stream) {
  return launch(decide, 1, kThreads, stream, request, tables);
}

cudaError_t update_step(const DeviceRun& run, const StepTables& tables, cudaStream_t stream) {
  const StepArguments& a = run.arguments;
  if (a.numel == 0) return cudaSuccess;
  const Kernel kernel = kernel_of(run.rule, a);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (!aligned(a) || run.first_element % kParameterAlign != 0) return cudaErrorMisalignedAddress;
  int count = 0;
  if (const cudaError_t error = multiprocessors(count); error != cudaSuccess) return error;
  const std::size_t needed = (a.numel + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>(needed, std::size_t(count) * kBlocksPerProcessor));
  return launch(kernel, blocks, kThreads, stream, run, tables);
}

}  // namespace tessera::cuda
