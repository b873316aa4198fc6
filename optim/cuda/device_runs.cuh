#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/block_codes.h"
#include "optim/arithmetic/rounding.h"
#include "optim/arithmetic/scalar_lane.h"
#include "optim/arithmetic/step_arguments.h"

namespace tessera::cuda {

// A warp computes 256 neighbouring elements, which are one block of an 8-bit state. A thread computes eight of them:
// four neighbours, and another four that begin 16 elements later. So four threads together read and write whole sectors
// of 32 bytes, for fp32 and for bf16. All eight elements lie within 32 elements that begin at a multiple of 32, and
// thus belong to one parameter (kParameterAlign).
constexpr int kPerThread = 8;
constexpr int kWarp = 32;
constexpr int kHalf = kPerThread / 2;
constexpr int kApart = 16;
static_assert(kWarp * kPerThread == kStateBlock);

/// Returns the index of a thread's first element among the 256 elements of its warp.
__device__ __forceinline__ std::size_t first_in_warp() {
  const unsigned lane = threadIdx.x % kWarp;
  return lane / 4 * 32 + lane % 4 * kHalf;
}

/// Returns the distance of a thread's `k`th element from its first element.
__device__ __forceinline__ constexpr std::size_t offset_of(int k) {
  return static_cast<std::size_t>(k < kHalf ? k : k - kHalf + kApart);
}

template <class T>
struct alignas(sizeof(T) * kHalf) HalfRun {
  T values[kHalf];
};

template <class T>
struct Run {
  T values[kPerThread];
};

/// Loads a thread's elements, the first of which is at `from`. Elements with an index of `left` or more are zero.
/// REQUIRES: `from` is aligned to four elements if all elements exist.
template <class T>
__device__ __forceinline__ Run<T> load_run(const T* from, std::size_t left) {
  Run<T> run = {};
  if (left > offset_of(kPerThread - 1)) {
    const HalfRun<T> front = *reinterpret_cast<const HalfRun<T>*>(from);
    const HalfRun<T> back = *reinterpret_cast<const HalfRun<T>*>(from + kApart);
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      run.values[k] = front.values[k];
      run.values[k + kHalf] = back.values[k];
    }
    return run;
  }
  // Unrolling the loop is necessary. If an index is known only at run time, the compiler keeps `run` in memory instead
  // of registers, even if all elements exist and the code above loads them.
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (offset_of(k) < left) run.values[k] = from[offset_of(k)];
  }
  return run;
}

/// Returns the bits of several narrow values packed into a word, with the first value in the lowest bits.
template <class T>
__device__ __forceinline__ std::uint32_t packed(const T* values, int count) {
  constexpr int kBits = 8 * sizeof(T);
  std::uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < count; ++k) {
    word |= (static_cast<std::uint32_t>(values[k]) & ((1u << kBits) - 1)) << (k * kBits);
  }
  return word;
}

/// Stores four values with one instruction. Narrow elements are stored as whole words; otherwise the compiler would
/// store the elements of a struct one by one.
template <class T>
__device__ __forceinline__ void store_half(T* to, const T* values) {
  if constexpr (sizeof(T) == 1) {
    *reinterpret_cast<std::uint32_t*>(to) = packed(values, 4);
  } else if constexpr (sizeof(T) == 2) {
    struct alignas(8) Words {
      std::uint32_t low, high;
    };
    *reinterpret_cast<Words*>(to) = {packed(values, 2), packed(values + 2, 2)};
  } else {
    *reinterpret_cast<HalfRun<T>*>(to) = {values[0], values[1], values[2], values[3]};
  }
}

template <class T>
__device__ __forceinline__ void store_run(T* to, std::size_t left, const Run<T>& run) {
  if (left > offset_of(kPerThread - 1)) {
    store_half(to, run.values);
    store_half(to + kApart, run.values + kHalf);
    return;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (offset_of(k) < left) to[offset_of(k)] = run.values[k];
  }
}

/// Calls `each(k)` for each of a thread's elements, in an unrolled loop.
template <class Each>
__device__ __forceinline__ void for_run(const Each& each) {
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) each(k);
}

// These types read and write weights, one type for each WeightFormat (on the CPU, weight_streams.h does so).

template <WeightFormat kFormat>
struct Weights {
  static __device__ __forceinline__ Run<float> load(const StepArguments& a, std::size_t i, std::size_t left) {
    if constexpr (kFormat != WeightFormat::kSplitBF16) {
      return load_run(a.master + i, left);
    } else {
      const Run<std::uint16_t> high = load_run(static_cast<const std::uint16_t*>(a.parameter) + i, left);
      const Run<std::int16_t> low = load_run(a.low + i, left);
      Run<float> masters;
      for_run([&](int k) {
        const auto low_bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(low.values[k]));
        masters.values[k] = ScalarLane::float_of(join_split<std::uint32_t>(high.values[k], low_bits));
      });
      return masters;
    }
  }

  static __device__ __forceinline__ void store(const StepArguments& a, std::size_t i, std::size_t left,
                                               const Run<float>& masters) {
    using Bits = std::uint32_t;
    if constexpr (kFormat == WeightFormat::kSplitBF16) {
      Run<std::uint16_t> high;
      Run<std::int16_t> low;
      for_run([&](int k) {
        const Bits bits = splittable<Bits>(masters.values[k]);
        high.values[k] = static_cast<std::uint16_t>(split_high(bits));
        low.values[k] = static_cast<std::int16_t>(static_cast<std::uint16_t>(split_low(bits)));
      });
      store_run(static_cast<std::uint16_t*>(a.parameter) + i, left, high);
      store_run(a.low + i, left, low);
      return;
    }
    store_run(a.master + i, left, masters);
    if constexpr (kFormat == WeightFormat::kF32AndF32) store_run(static_cast<float*>(a.parameter) + i, left, masters);
    if constexpr (kFormat == WeightFormat::kF32AndBF16 || kFormat == WeightFormat::kF32AndF16) {
      Run<std::uint16_t> copy;
      for_run([&](int k) {
        const Bits half = kFormat == WeightFormat::kF32AndF16 ? fp16_nearest<Bits>(masters.values[k])
                                                              : bf16_nearest<Bits>(masters.values[k]);
        copy.values[k] = static_cast<std::uint16_t>(half);
      });
      store_run(static_cast<std::uint16_t*>(a.parameter) + i, left, copy);
    }
  }
};

// These types read and write moments (on the CPU, state_streams.h does so). `noise`: kNoiseBits<BlockCode> random bits
// for each element. All threads of a warp must call these functions together.

template <StateDType kDType>
struct Moment;

template <>
struct Moment<StateDType::kF32> {
  template <class BlockCode>
  static __device__ __forceinline__ Run<float> load(const StateArgument& a, std::size_t i, std::size_t left) {
    return load_run(static_cast<const float*>(a.data) + i, left);
  }
  template <class BlockCode>
  static __device__ __forceinline__ void store(const StateArgument& a, std::size_t i, std::size_t left,
                                               const Run<float>& values, const Run<std::uint32_t>&) {
    store_run(static_cast<float*>(a.data) + i, left, values);
  }
};

template <>
struct Moment<StateDType::kBF16> {
  template <class BlockCode>
  static constexpr int kNoiseBits = 16;
  template <class BlockCode>
  static __device__ __forceinline__ Run<float> load(const StateArgument& a, std::size_t i, std::size_t left) {
    const Run<std::uint16_t> halves = load_run(static_cast<const std::uint16_t*>(a.data) + i, left);
    Run<float> values;
    for_run([&](int k) { values.values[k] = ScalarLane::float_of(std::uint32_t{halves.values[k]} << 16); });
    return values;
  }
  template <class BlockCode>
  static __device__ __forceinline__ void store(const StateArgument& a, std::size_t i, std::size_t left,
                                               const Run<float>& values, const Run<std::uint32_t>& noise) {
    Run<std::uint16_t> halves;
    for_run([&](int k) {
      halves.values[k] = ScalarLane::tops(bf16_stochastic<std::uint32_t>(values.values[k], noise.values[k]));
    });
    store_run(static_cast<std::uint16_t*>(a.data) + i, left, halves);
  }
};

template <>
struct Moment<StateDType::k8Bit> {
  template <class BlockCode>
  static constexpr int kNoiseBits = BlockCode::Code::kNoiseBits;
  template <class BlockCode>
  static __device__ __forceinline__ Run<float> load(const StateArgument& a, std::size_t i, std::size_t left) {
    using Byte = typename BlockCode::Byte;
    const Run<Byte> codes = load_run(static_cast<const Byte*>(a.data) + i, left);
    const float scale = left > 0 ? a.scales[i / kStateBlock] : 0.0f;
    Run<float> values;
    for_run([&](int k) { values.values[k] = BlockCode::decode(codes.values[k], scale); });
    return values;
  }
  /// `values`: the inputs of BlockCode::magnitude; for the second moment, these are the square roots.
  template <class BlockCode>
  static __device__ __forceinline__ void store(const StateArgument& a, std::size_t i, std::size_t left,
                                               const Run<float>& values, const Run<std::uint32_t>& noise) {
    using Byte = typename BlockCode::Byte;
    std::uint32_t most = 0;
    for_run([&](int k) {
      const std::uint32_t magnitude = ScalarLane::bits_of(values.values[k]) & 0x7fffffffu;
      if (offset_of(k) < left && magnitude > most) most = magnitude;
    });
    most = __reduce_max_sync(0xffffffffu, most);
    const BlockScale next = block_scale<typename BlockCode::Code>(ScalarLane::float_of(most));
    Run<Byte> codes;
    for_run([&](int k) {
      const float value = values.values[k];
      const std::uint32_t magnitude = BlockCode::magnitude(value, next.half_inverse, noise.values[k]);
      codes.values[k] = static_cast<Byte>(BlockCode::code(ScalarLane::words<BlockCode::Code::kNoiseBits>(magnitude),
                                                          ScalarLane::tops(ScalarLane::bits_of(value))));
    });
    if (left == 0) return;
    store_run(static_cast<Byte*>(a.data) + i, left, codes);
    if (i % kStateBlock == 0) a.scales[i / kStateBlock] = next.scale;
  }
};

}  // namespace tessera::cuda
