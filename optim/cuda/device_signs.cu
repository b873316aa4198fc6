// This file encodes messages of signs on a GPU. It is compiled without contraction of a * b + c into one rounding, like
// the CPU's loops.
//
// A warp takes one run of kMessageRun elements at a time. In register w, a lane has element 32 w + lane of the run, so
// the word w of a run is a ballot of the warp. Another launch fills the messages with zeros first.

#include <math.h>

#include <algorithm>

#include "optim/cuda/device_signs.h"
#include "runtime/base/cuda_launch.h"
#include "runtime/base/message_words.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kSignLanes = 32, kSignThreads = 256, kSignWarps = kSignThreads / kSignLanes;
constexpr unsigned kSignRun = static_cast<unsigned>(kMessageRun), kSignWords = kSignRun / kSignLanes;
constexpr unsigned kAllLanes = 0xffffffffu;
/// Number of partial sums in the sum over a run, as in sign_codec.cc.
constexpr unsigned kSignSums = 16;

__device__ unsigned sign_lane() { return threadIdx.x % kSignLanes; }

/// The elements of one run that a lane has. Elements that do not exist are zeros.
struct SignRun {
  std::size_t first;  ///< index of the run's first element
  unsigned count;     ///< number of elements
  float values[kSignWords];

  __device__ SignRun(const SignMessages& how, const float* from, unsigned run) : first(std::size_t{run} * kSignRun) {
    const std::size_t left = how.numel - first;
    count = left < kSignRun ? static_cast<unsigned>(left) : kSignRun;
#pragma unroll
    for (unsigned w = 0; w < kSignWords; ++w) values[w] = has(w) ? from[first + index(w)] : 0.0f;
  }
  __device__ static unsigned index(unsigned w) { return w * kSignLanes + sign_lane(); }
  __device__ bool has(unsigned w) const { return index(w) < count; }
};

/// Returns the sum of the run's magnitudes to all lanes. Lane k of the first 16 adds the elements k, k + 16, ...; then
/// the lanes' sums are added in a tree, as in sign_codec.cc.
__device__ float sum_of_magnitudes(const SignRun& run) {
  float sum = 0.0f;
#pragma unroll
  for (unsigned w = 0; w < kSignWords; ++w) {
    const float own = fabsf(run.values[w]), next = __shfl_down_sync(kAllLanes, own, kSignSums, kSignLanes);
    sum += own;
    sum += next;
  }
#pragma unroll
  for (unsigned half = kSignSums / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half, kSignLanes);
  // The first lane has the whole sum. It is not negative, so its bits are the largest if the other lanes give 0.
  const std::uint32_t bits = sign_lane() == 0 ? __builtin_bit_cast(std::uint32_t, sum) : 0u;
  return __builtin_bit_cast(float, __reduce_max_sync(kAllLanes, bits));
}

/// Writes the run's words. `word_of(w)` is called by all lanes, and returns word w to all of them.
template <class WordOf>
__device__ void store_words(std::uint32_t* words, const WordOf& word_of) {
  std::uint32_t own = 0;
#pragma unroll
  for (unsigned w = 0; w < kSignWords; ++w) {
    const std::uint32_t word = word_of(w);
    if (sign_lane() == w) own = word;
  }
  if (sign_lane() < kSignWords) words[sign_lane()] = own;
}

__device__ void vote(const SignMessages& how, const SignRun& run, std::uint32_t* message, unsigned own_run) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  const std::uint32_t of_zeros = votes_of_zeros(how.turn);
  std::uint32_t largest = 0;
  store_words(message + 1 + own_run * kSignWords, [&](unsigned w) {
    const auto bits = __builtin_bit_cast(std::uint32_t, run.values[w]);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
    const std::uint32_t negative = __ballot_sync(kAllLanes, bits >> 31);
    return vote_word(negative, __ballot_sync(kAllLanes, run.has(w) && magnitude == 0), of_zeros);
  });
  if (__reduce_max_sync(kAllLanes, largest) >= kInfinity && sign_lane() == 0) *message = 1;
}

__device__ void send_scaled(const SignMessages& how, SignRun& run, std::uint32_t* message, unsigned own_run) {
  float* const kept = how.kept + run.first;
#pragma unroll
  for (unsigned w = 0; w < kSignWords; ++w) {
    if (run.has(w)) run.values[w] = kept[run.index(w)] + run.values[w];
  }
  const float scale = sum_of_magnitudes(run) / static_cast<float>(run.count);
  message += own_run * (1 + kSignWords);
  if (sign_lane() == 0) *message = __builtin_bit_cast(std::uint32_t, scale);
  store_words(message + 1, [&](unsigned w) {
    const std::uint32_t word = __ballot_sync(kAllLanes, __builtin_bit_cast(std::uint32_t, run.values[w]) >> 31);
    if (run.has(w)) kept[run.index(w)] = run.values[w] - with_sign(scale, word, sign_lane());
    return word;
  });
}

template <SignMessages::Kind kKind>
__global__ void __launch_bounds__(kSignThreads)
    encode_runs(SignMessages how, const float* values, std::uint32_t* messages) {
  const auto runs = static_cast<unsigned>(message_runs(how.numel));
  const auto part_runs = static_cast<unsigned>(message_runs(how.part_numel));
  for (unsigned i = blockIdx.x * kSignWarps + threadIdx.x / kSignLanes; i < runs; i += gridDim.x * kSignWarps) {
    SignRun run(how, values, i);
    std::uint32_t* const message = messages + i / part_runs * how.part_words;
    if constexpr (kKind == SignMessages::Kind::kVotes) {
      vote(how, run, message, i % part_runs);
    } else {
      send_scaled(how, run, message, i % part_runs);
    }
  }
}

__global__ void __launch_bounds__(kSignThreads) clear_words(std::uint32_t* words, std::size_t count) {
  const std::size_t step = std::size_t{gridDim.x} * kSignThreads;
  for (std::size_t i = std::size_t{blockIdx.x} * kSignThreads + threadIdx.x; i < count; i += step) words[i] = 0;
}

unsigned sign_blocks(std::size_t needed, unsigned most_blocks) {
  return static_cast<unsigned>(std::min<std::size_t>(needed, most_blocks));
}

}  // namespace

cudaError_t encode_sign_messages(const SignMessages& how, const float* values, std::uint32_t* messages,
                                 unsigned most_blocks, cudaStream_t stream) {
  const std::size_t words = how.parts * how.part_words, runs = message_runs(how.numel);
  if (words == 0) return cudaSuccess;
  const unsigned for_words = sign_blocks((words + kSignThreads - 1) / kSignThreads, most_blocks);
  const cudaError_t error = launch(clear_words, for_words, kSignThreads, stream, messages, words);
  if (error != cudaSuccess || runs == 0) return error;
  const auto kernel = how.kind == SignMessages::Kind::kVotes ? encode_runs<SignMessages::Kind::kVotes>
                                                             : encode_runs<SignMessages::Kind::kScaled>;
  const unsigned for_runs = sign_blocks((runs + kSignWarps - 1) / kSignWarps, most_blocks);
  return launch(kernel, for_runs, kSignThreads, stream, how, values, messages);
}

}  // namespace tessera::cuda
