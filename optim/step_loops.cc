#include "optim/step_loops.h"

#include "optim/rounding.h"

namespace tessera {
namespace {

// How an updated master value leaves the loop a second time, in the dtype of the model's parameter.
struct StoreNothing {
  using Element = void;
  static TESSERA_ALWAYS_INLINE void put(void*, std::size_t, float) {}
};
struct StoreF32 {
  using Element = float;
  static TESSERA_ALWAYS_INLINE void put(float* out, std::size_t i, float value) { out[i] = value; }
};
struct StoreBF16 {
  using Element = std::uint16_t;
  static TESSERA_ALWAYS_INLINE void put(std::uint16_t* out, std::size_t i, float value) {
    out[i] = round_to_bf16(value);
  }
};
struct StoreF16 {
  using Element = std::uint16_t;
  static TESSERA_ALWAYS_INLINE void put(std::uint16_t* out, std::size_t i, float value) {
    out[i] = round_to_fp16(value);
  }
};

template <class Store, bool kDecoupled>
TESSERA_ALWAYS_INLINE void adam_loop(const AdamConstants& constants, const OptimizerSlice& slice) {
  const AdamConstants c = constants;
  const std::size_t n = slice.master.size();
  float* __restrict p = slice.master.data();
  const float* __restrict gradient = slice.gradient.data();
  float* __restrict m = slice.state0.data();
  float* __restrict v = slice.state1.data();
  auto* __restrict out = static_cast<typename Store::Element*>(slice.parameter);
  for (std::size_t i = 0; i < n; ++i) {
    float weight = p[i];
    float g = gradient[i] * c.gradient_scale;
    if constexpr (kDecoupled) {
      weight *= c.decay;
    } else {
      g += c.l2 * weight;
    }
    const float first = m[i] + (g - m[i]) * c.one_minus_beta1;
    const float second = v[i] * c.beta2 + (g * g) * c.one_minus_beta2;
    weight -= (c.step_size * first) / (__builtin_sqrtf(second) + c.eps);
    m[i] = first;
    v[i] = second;
    p[i] = weight;
    Store::put(out, i, weight);
  }
}

enum class Momentum { kNone, kFirstStep, kLaterStep };

template <class Store, Momentum kMomentum, bool kNesterov>
TESSERA_ALWAYS_INLINE void sgd_loop(const SgdConstants& constants, const OptimizerSlice& slice) {
  const SgdConstants c = constants;
  const std::size_t n = slice.master.size();
  float* __restrict p = slice.master.data();
  const float* __restrict gradient = slice.gradient.data();
  float* __restrict buffer = slice.state0.data();
  auto* __restrict out = static_cast<typename Store::Element*>(slice.parameter);
  for (std::size_t i = 0; i < n; ++i) {
    float weight = p[i];
    const float g = gradient[i] * c.gradient_scale + c.l2 * weight;
    float direction = g;
    if constexpr (kMomentum != Momentum::kNone) {
      float updated = g;
      if constexpr (kMomentum == Momentum::kLaterStep) updated = buffer[i] * c.momentum + g * c.one_minus_dampening;
      buffer[i] = updated;
      direction = kNesterov ? g + c.momentum * updated : updated;
    }
    weight -= c.lr * direction;
    p[i] = weight;
    Store::put(out, i, weight);
  }
}

template <class Store>
TESSERA_ALWAYS_INLINE void adam_into(const AdamConstants& c, const OptimizerSlice& slice) {
  c.decoupled ? adam_loop<Store, true>(c, slice) : adam_loop<Store, false>(c, slice);
}

template <class Store, Momentum kMomentum>
TESSERA_ALWAYS_INLINE void sgd_with(const SgdConstants& c, const OptimizerSlice& slice) {
  c.nesterov ? sgd_loop<Store, kMomentum, true>(c, slice) : sgd_loop<Store, kMomentum, false>(c, slice);
}

template <class Store>
TESSERA_ALWAYS_INLINE void sgd_into(const SgdConstants& c, const OptimizerSlice& slice) {
  if (!c.has_momentum) return sgd_loop<Store, Momentum::kNone, false>(c, slice);
  c.first_step ? sgd_with<Store, Momentum::kFirstStep>(c, slice) : sgd_with<Store, Momentum::kLaterStep>(c, slice);
}

// The parameter's dtype is chosen outside the loop, so that the loop itself has no branch.
TESSERA_ALWAYS_INLINE void adam_any(const AdamConstants& c, const OptimizerSlice& slice) {
  if (slice.parameter == nullptr) return adam_into<StoreNothing>(c, slice);
  if (slice.parameter_dtype == DType::kBF16) return adam_into<StoreBF16>(c, slice);
  if (slice.parameter_dtype == DType::kF16) return adam_into<StoreF16>(c, slice);
  adam_into<StoreF32>(c, slice);
}

TESSERA_ALWAYS_INLINE void sgd_any(const SgdConstants& c, const OptimizerSlice& slice) {
  if (slice.parameter == nullptr) return sgd_into<StoreNothing>(c, slice);
  if (slice.parameter_dtype == DType::kBF16) return sgd_into<StoreBF16>(c, slice);
  if (slice.parameter_dtype == DType::kF16) return sgd_into<StoreF16>(c, slice);
  sgd_into<StoreF32>(c, slice);
}

void adam_portable(const AdamConstants& c, const OptimizerSlice& slice) { adam_any(c, slice); }
void sgd_portable(const SgdConstants& c, const OptimizerSlice& slice) { sgd_any(c, slice); }
TESSERA_TARGET_AVX2 void adam_avx2(const AdamConstants& c, const OptimizerSlice& slice) { adam_any(c, slice); }
TESSERA_TARGET_AVX2 void sgd_avx2(const SgdConstants& c, const OptimizerSlice& slice) { sgd_any(c, slice); }
TESSERA_TARGET_AVX512 void adam_avx512(const AdamConstants& c, const OptimizerSlice& slice) { adam_any(c, slice); }
TESSERA_TARGET_AVX512 void sgd_avx512(const SgdConstants& c, const OptimizerSlice& slice) { sgd_any(c, slice); }

}  // namespace

const StepLoops& step_loops(InstructionSet set) {
  static constexpr StepLoops kPortable{adam_portable, sgd_portable};
  static constexpr StepLoops kAvx2{adam_avx2, sgd_avx2};
  static constexpr StepLoops kAvx512{adam_avx512, sgd_avx512};
  switch (set) {
    case InstructionSet::kPortable: break;
    case InstructionSet::kAvx2: return kAvx2;
    case InstructionSet::kAvx512: return kAvx512;
  }
  return kPortable;
}

}  // namespace tessera
