#pragma once

#if defined(__CUDACC__)
#include <cuda_pipeline_primitives.h>
#endif

#include <cstddef>

#include "optim/cuda/device_runs.cuh"
#include "optim/cuda/rule_states.cuh"

namespace tessera::cuda {
namespace {

// An element with 8-bit states needs 10 bytes and about 100 instructions. So only a few warps fit on a multiprocessor,
// and each of them computes for a long time. The loads of so few warps would not keep the memory busy. While a warp
// computes one block, it therefore copies the next block into shared memory (double buffering). While such a copy is
// under way, it needs neither the thread nor registers.

/// The values of a block's 256 elements that the update reads. They are in shared memory, or are being copied there.
/// All states have 8 bits.
template <class Rule, WeightFormat kWeights>
struct StagedBlock {
  static constexpr bool kIsSplit = kWeights == WeightFormat::kSplitBF16;

  alignas(16) std::byte gradient[4 * kStateBlock];
  alignas(16) std::byte weight[4 * kStateBlock];  ///< the masters, or their two halves
  alignas(16) std::byte states[Rule::kStates][kStateBlock];
  alignas(16) float scales[Rule::kStates];

  /// Begins the copies of the 256 elements from `begin` on. All threads of a warp call it together. REQUIRES: all 256
  /// elements exist.
  __device__ __forceinline__ void begin_copies(const StepArguments& a, std::size_t begin) {
    const unsigned lane = threadIdx.x % kWarp;
    copy<4 * kStateBlock>(gradient, a.gradient + begin, lane);
    if constexpr (kIsSplit) {
      copy<2 * kStateBlock>(weight, static_cast<const std::uint16_t*>(a.parameter) + begin, lane);
      copy<2 * kStateBlock>(weight + 2 * kStateBlock, a.low + begin, lane);
    } else {
      copy<4 * kStateBlock>(weight, a.master + begin, lane);
    }
    for_states<Rule>([&]<int k>() {
      if (!StateOf<Rule, StateDType::k8Bit, k>::is_kept(a)) return;
      copy<kStateBlock>(states[k], static_cast<const std::byte*>(a.states[k].data) + begin, lane);
      if (lane == k) __pipeline_memcpy_async(&scales[k], a.states[k].scales + begin / kStateBlock, sizeof(float));
    });
  }

  /// Returns the block as a separate run.
  __device__ __forceinline__ StepArguments arguments() {
    StepArguments a{};
    a.gradient = reinterpret_cast<float*>(gradient);
    if constexpr (kIsSplit) {
      a.parameter = weight;
      a.low = reinterpret_cast<std::int16_t*>(weight + 2 * kStateBlock);
    } else {
      a.master = reinterpret_cast<float*>(weight);
    }
    for_states<Rule>([&]<int k>() { a.states[k] = {states[k], &scales[k]}; });
    return a;
  }

 private:
  template <int kBytes>
  static __device__ __forceinline__ void copy(std::byte* to, const void* from, unsigned lane) {
    constexpr int kAtOnce = 16;
#pragma unroll
    for (int first = 0; first < kBytes; first += kWarp * kAtOnce) {
      const unsigned at = first + lane * kAtOnce;
      if (kBytes - first < kWarp * kAtOnce && at >= kBytes) return;
      __pipeline_memcpy_async(to + at, static_cast<const std::byte*>(from) + at, kAtOnce);
    }
  }
};

/// A warp's blocks. Two of them are in shared memory: the block that is being computed, and the next one.
template <class Rule, WeightFormat kWeights, int kWarps>
class StagedBlocks {
 public:
  static constexpr bool kAreStaged = true;

  __device__ __forceinline__ StagedBlocks(const StepArguments& a, std::size_t first)
      : mine_(shared()[threadIdx.x / kWarp]) {
    begin(a, first);
  }
  /// Begins the copy of the block that starts at `next`, and waits for the block whose copy was begun before that.
  __device__ __forceinline__ void move_on(const StepArguments& a, std::size_t next) {
    __syncwarp();  // all threads have read the values that are now overwritten
    begin(a, next);
    __pipeline_wait_prior(1);
    __syncwarp();  // copies of other threads must have arrived too
  }
  __device__ __forceinline__ StepArguments current() { return mine_[coming_].arguments(); }

 private:
  using Pair = StagedBlock<Rule, kWeights>[2];

  static __device__ __forceinline__ Pair* shared() {
    __shared__ Pair pairs[kWarps];
    return pairs;
  }
  /// Begins the copy of the block at `first`. A block that the run's end cuts off is not copied, and is read in place.
  __device__ __forceinline__ void begin(const StepArguments& a, std::size_t first) {
    if (first + kStateBlock <= a.numel) mine_[coming_].begin_copies(a, first);
    __pipeline_commit();
    coming_ ^= 1;
  }

  Pair& mine_;
  int coming_ = 0;  ///< index of the block to which the next copy goes, the older of the two
};

/// Blocks that are not copied, but read in place.
struct BlocksInPlace {
  static constexpr bool kAreStaged = false;
  __device__ __forceinline__ BlocksInPlace(const StepArguments&, std::size_t) {}
  __device__ __forceinline__ void move_on(const StepArguments&, std::size_t) {}
};

/// Whether no state of the rule is StateCode::kExact, so that all states can have 8 bits.
template <class Rule>
constexpr bool kHasCodesOnly = [] {
  for (const StateCode code : Rule::kCodes) {
    if (code == StateCode::kExact) return false;
  }
  return true;
}();

template <bool kAreStaged, class Rule, WeightFormat kWeights, int kWarps>
struct ChosenBlocks {
  using type = BlocksInPlace;
};
template <class Rule, WeightFormat kWeights, int kWarps>
struct ChosenBlocks<true, Rule, kWeights, kWarps> {
  using type = StagedBlocks<Rule, kWeights, kWarps>;
};
/// The kind of blocks that an update kernel uses.
template <class Rule, WeightFormat kWeights, StateDType kStates, int kWarps>
using BlocksOf =
    typename ChosenBlocks<kStates == StateDType::k8Bit && kHasCodesOnly<Rule>, Rule, kWeights, kWarps>::type;

}  // namespace
}  // namespace tessera::cuda
