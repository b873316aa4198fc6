// This file has the codecs of the wire for a GPU. It is compiled without contraction of a * b + c into one rounding,
// like the CPU's loops.
//
// A warp encodes or decodes one block of kCodecBlock elements at a time. A lane has eight elements of the block: four
// neighbours in each half. A code word of a lane therefore has the codes of four neighbours (int8), or of neighbours in
// both halves (int4). A whole block whose values are aligned is moved by vectors of four elements; other blocks are
// moved element by element.

#include <cuda_fp16.h>

#include <algorithm>

#include "optim/arithmetic/rounding.h"
#include "optim/cuda/device_codec.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kCodecLanes = 32, kCodecThreads = 256, kCodecWarps = kCodecThreads / kCodecLanes;
constexpr unsigned kCodecQuad = 4;  // number of neighbouring elements that a lane has in each half of a block
constexpr auto kCodecElements = static_cast<unsigned>(kCodecBlock);

/// The elements of a dtype, as they lie in memory.
template <DType kDType>
struct CodecElement {  // this is bf16
  using Stored = std::uint16_t;
  static __device__ float wide(Stored bits) { return __builtin_bit_cast(float, std::uint32_t{bits} << 16); }
  static __device__ Stored narrow(float value) { return static_cast<Stored>(bf16_nearest<std::uint32_t>(value)); }
};
template <>
struct CodecElement<DType::kF32> {
  using Stored = float;
  static __device__ float wide(Stored value) { return value; }
  static __device__ Stored narrow(float value) { return value; }
};
template <>
struct CodecElement<DType::kF16> {
  using Stored = std::uint16_t;
  static __device__ float wide(Stored bits) { return __half2float(__builtin_bit_cast(__half, bits)); }
  static __device__ Stored narrow(float value) { return static_cast<Stored>(fp16_nearest<std::uint32_t>(value)); }
};

template <class T>
struct alignas(sizeof(T) * kCodecQuad) CodecVector {
  T values[kCodecQuad];
};

template <class T>
__device__ bool is_vector(const T* memory) {
  return reinterpret_cast<std::uintptr_t>(memory) % sizeof(CodecVector<T>) == 0;
}

/// The place of one block's values, and of its scale and codes in the messages.
struct CodecPlace {
  std::size_t first;         ///< index of the block's first element among all values
  unsigned count;            ///< number of elements of the block
  unsigned half;             ///< index in the block of the first element of the second half
  std::size_t scale, codes;  ///< offsets in bytes

  __device__ CodecPlace(const EncodedParts& parts, unsigned block) {
    const auto blocks = static_cast<unsigned>(codec_blocks(parts.part_numel));
    const std::size_t part = block / blocks, own = block % blocks;
    const std::size_t left = parts.part_numel - own * kCodecBlock;
    first = part * parts.part_numel + own * kCodecBlock;
    count = left < kCodecBlock ? static_cast<unsigned>(left) : kCodecElements;
    half = parts.form == WireForm::kInt8 ? kCodecElements / 2 : (count + 1) / 2;
    scale = part * parts.part_bytes() + own * sizeof(float);
    codes = part * parts.part_bytes() + codes_at(parts.form, blocks, own);
  }
  __device__ bool is_whole() const { return count == kCodecElements; }
};

/// The eight elements of one lane. Element [h][k] is number 4 * lane + k of half h.
struct CodecLane {
  const CodecPlace& place;
  unsigned begin = threadIdx.x % kCodecLanes * kCodecQuad;  ///< 4 * lane

  __device__ unsigned index(unsigned h, unsigned k) const { return h * place.half + begin + k; }
  __device__ bool has(unsigned h, unsigned k) const { return begin + k < place.half && index(h, k) < place.count; }

  /// Calls `each(h, k, i)` for this lane's elements that exist; i is the index in the block.
  template <class Each>
  __device__ void for_elements(const Each& each) const {
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
#pragma unroll
      for (unsigned k = 0; k < kCodecQuad; ++k) {
        if (place.is_whole() || has(h, k)) each(h, k, index(h, k));
      }
    }
  }
  /// Calls `take(h, k, element)` for this lane's elements. `block` points to the block's first element.
  template <class T, class Take>
  __device__ void load(const T* block, const Take& take) const {
    if (!place.is_whole() || !is_vector(block)) {
      for_elements([&](unsigned h, unsigned k, unsigned i) { take(h, k, block[i]); });
      return;
    }
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
      const auto loaded = *reinterpret_cast<const CodecVector<T>*>(block + index(h, 0));
#pragma unroll
      for (unsigned k = 0; k < kCodecQuad; ++k) take(h, k, loaded.values[k]);
    }
  }
  /// Sets this lane's elements to `give(h, k)`.
  template <class T, class Give>
  __device__ void store(T* block, const Give& give) const {
    if (!place.is_whole() || !is_vector(block)) {
      for_elements([&](unsigned h, unsigned k, unsigned i) { block[i] = give(h, k); });
      return;
    }
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
      CodecVector<T> stored;
#pragma unroll
      for (unsigned k = 0; k < kCodecQuad; ++k) stored.values[k] = give(h, k);
      *reinterpret_cast<CodecVector<T>*>(block + index(h, 0)) = stored;
    }
  }
};

/// Writes this lane's codes, which are 0 for elements that do not exist. The codes of a whole block are written as
/// words of 32 bits.
template <WireForm kForm>
__device__ void store_codes(const CodecLane& lane, const std::int32_t (&codes)[2][kCodecQuad], std::byte* block) {
  if constexpr (kForm == WireForm::kInt8) {
    auto* const bytes = reinterpret_cast<std::uint8_t*>(block);
    if (!lane.place.is_whole()) {
      lane.for_elements([&](unsigned h, unsigned k, unsigned i) { bytes[i] = static_cast<std::uint8_t>(codes[h][k]); });
      return;
    }
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
      std::uint32_t word = 0;
#pragma unroll
      for (unsigned k = 0; k < kCodecQuad; ++k) word |= (static_cast<std::uint32_t>(codes[h][k]) & 0xffu) << (8 * k);
      *reinterpret_cast<std::uint32_t*>(bytes + lane.index(h, 0)) = word;
    }
  } else {
    std::uint32_t word = 0;
#pragma unroll
    for (unsigned k = 0; k < kCodecQuad; ++k) {
      const auto low = static_cast<std::uint32_t>(codes[0][k]) & 0xfu,
                 high = static_cast<std::uint32_t>(codes[1][k]) & 0xfu;
      word |= (low | high << 4) << (8 * k);
    }
    auto* const bytes = reinterpret_cast<std::uint8_t*>(block) + lane.begin;
    if (lane.place.is_whole()) {
      *reinterpret_cast<std::uint32_t*>(bytes) = word;
      return;
    }
    for (unsigned k = 0; k < kCodecQuad && lane.begin + k < lane.place.half; ++k)
      bytes[k] = static_cast<std::uint8_t>(word >> (8 * k));
  }
}

/// Returns the signed code in the lowest `kBits` bits of `bits`.
template <int kBits>
__device__ std::int32_t signed_code(std::uint32_t bits) {
  return static_cast<std::int32_t>(bits << (32 - kBits)) >> (32 - kBits);
}

/// Reverses store_codes. Codes of elements that do not exist are not defined.
template <WireForm kForm>
__device__ void load_codes(const CodecLane& lane, const std::byte* block, std::int32_t (&codes)[2][kCodecQuad]) {
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(block);
  if constexpr (kForm == WireForm::kInt8) {
    lane.load(bytes, [&](unsigned h, unsigned k, std::uint8_t code) { codes[h][k] = signed_code<8>(code); });
  } else {
    std::uint32_t word = 0;
    if (lane.place.is_whole()) {
      word = *reinterpret_cast<const std::uint32_t*>(bytes + lane.begin);
    } else {
      for (unsigned k = 0; k < kCodecQuad && lane.begin + k < lane.place.half; ++k)
        word |= std::uint32_t{bytes[lane.begin + k]} << (8 * k);
    }
#pragma unroll
    for (unsigned k = 0; k < kCodecQuad; ++k) {
      codes[0][k] = signed_code<4>(word >> (8 * k));
      codes[1][k] = signed_code<4>(word >> (8 * k + 4));
    }
  }
}

/// Calls `each(place)` for the blocks of this warp.
template <class Each>
__device__ void for_codec_blocks(const EncodedParts& parts, const Each& each) {
  const auto blocks = static_cast<unsigned>(parts.blocks());
  for (unsigned i = blockIdx.x * kCodecWarps + threadIdx.x / kCodecLanes; i < blocks; i += gridDim.x * kCodecWarps)
    each(CodecPlace(parts, i));
}

template <DType kDType, WireForm kForm>
__global__ void __launch_bounds__(kCodecThreads)
    encode_blocks(EncodedParts parts, const void* values, float* residual, std::byte* messages) {
  using Element = CodecElement<kDType>;
  for_codec_blocks(parts, [&](const CodecPlace& place) {
    const CodecLane lane{place};
    float x[2][kCodecQuad] = {};
    lane.load(static_cast<const typename Element::Stored*>(values) + place.first,
              [&](unsigned h, unsigned k, typename Element::Stored value) { x[h][k] = Element::wide(value); });
    if (residual != nullptr)
      lane.load(residual + place.first, [&](unsigned h, unsigned k, float value) { x[h][k] += value; });
    std::uint32_t largest = 0;
#pragma unroll
    for (const auto& half : x) {
#pragma unroll
      for (const float value : half) {
        const std::uint32_t magnitude = __builtin_bit_cast(std::uint32_t, value) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    const WireScale scale = wire_scale(kForm, __reduce_max_sync(0xffffffffu, largest));
    std::int32_t codes[2][kCodecQuad] = {};
    if (scale.inverse != 0) {  // a product of 0 and an infinity or NaN is not 0
#pragma unroll
      for (unsigned h = 0; h < 2; ++h) {
#pragma unroll
        for (unsigned k = 0; k < kCodecQuad; ++k) codes[h][k] = code_of(x[h][k], scale.inverse);
      }
    }
    if (threadIdx.x % kCodecLanes == 0) *reinterpret_cast<float*>(messages + place.scale) = scale.spacing;
    store_codes<kForm>(lane, codes, messages + place.codes);
    if (residual == nullptr || scale.spacing != scale.spacing) return;
    lane.store(residual + place.first,
               [&](unsigned h, unsigned k) { return x[h][k] - value_of_code(codes[h][k], scale.spacing); });
  });
}

template <DType kDType, WireForm kForm>
__global__ void __launch_bounds__(kCodecThreads)
    decode_blocks(EncodedParts parts, const std::byte* messages, void* values) {
  using Element = CodecElement<kDType>;
  for_codec_blocks(parts, [&](const CodecPlace& place) {
    const CodecLane lane{place};
    const float spacing = *reinterpret_cast<const float*>(messages + place.scale);
    std::int32_t codes[2][kCodecQuad] = {};
    load_codes<kForm>(lane, messages + place.codes, codes);
    lane.store(static_cast<typename Element::Stored*>(values) + place.first,
               [&](unsigned h, unsigned k) { return Element::narrow(value_of_code(codes[h][k], spacing)); });
  });
}

using EncodeKernel = void (*)(EncodedParts, const void*, float*, std::byte*);
using DecodeKernel = void (*)(EncodedParts, const std::byte*, void*);

/// Returns `call.template operator()<dtype, form>()` for a dtype and a form that are known only at run time, or a value
/// of zero if there is no such codec.
template <class Call>
auto with_codec(const EncodedParts& parts, const Call& call) {
  const auto with_form = [&]<DType kDType>() {
    if (parts.form == WireForm::kInt4) return call.template operator()<kDType, WireForm::kInt4>();
    return call.template operator()<kDType, WireForm::kInt8>();
  };
  using Found = decltype(with_form.template operator()<DType::kF32>());
  if (!is_lossy(parts.form)) return Found{};
  if (parts.dtype == DType::kF32) return with_form.template operator()<DType::kF32>();
  if (parts.dtype == DType::kBF16) return with_form.template operator()<DType::kBF16>();
  if (parts.dtype == DType::kF16) return with_form.template operator()<DType::kF16>();
  return Found{};
}

/// Starts `kernel` with as many thread blocks as are useful, and at most `most_blocks`. Does nothing if there are no
/// elements.
template <class Kernel, class... Arguments>
cudaError_t launch_codec(Kernel kernel, const EncodedParts& parts, unsigned most_blocks, cudaStream_t stream,
                         Arguments... arguments) {
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (parts.blocks() == 0) return cudaSuccess;
  const std::size_t needed = (parts.blocks() + kCodecWarps - 1) / kCodecWarps;
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>(needed, most_blocks));
  return launch(kernel, blocks, kCodecThreads, stream, parts, arguments...);
}

}  // namespace

cudaError_t encode_parts(const EncodedParts& parts, const void* values, float* residual, std::byte* messages,
                         unsigned most_blocks, cudaStream_t stream) {
  const EncodeKernel kernel =
      with_codec(parts, [&]<DType kDType, WireForm kForm>() -> EncodeKernel { return encode_blocks<kDType, kForm>; });
  return launch_codec(kernel, parts, most_blocks, stream, values, residual, messages);
}

cudaError_t decode_parts(const EncodedParts& parts, const std::byte* messages, void* values, unsigned most_blocks,
                         cudaStream_t stream) {
  const DecodeKernel kernel =
      with_codec(parts, [&]<DType kDType, WireForm kForm>() -> DecodeKernel { return decode_blocks<kDType, kForm>; });
  return launch_codec(kernel, parts, most_blocks, stream, messages, values);
}

}  // namespace tessera::cuda
