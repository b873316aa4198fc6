#pragma once

#include "optim/average_element.h"
#include "optim/rules/rules.h"
#include "optim/scaled_gradient.h"
#include "optim/state_streams.h"
#include "optim/step_loops.h"
#include "optim/weight_streams.h"

namespace tessera {
namespace {

// The loops, for any vector type V, any rule, any kind of weights and any kind of state. Elements are independent of each
// other (but for the scale of an 8-bit block), and each operation is rounded on its own.

#define TESSERA_INLINE_BODY __attribute__((always_inline))

/// Calls `body(i, count)` for the elements [begin, end), a vector at a time; the last call may have fewer.
template <class V, class Body>
TESSERA_ALWAYS_INLINE void for_vectors(std::size_t begin, std::size_t end, const Body& body) {
  std::size_t i = begin;
  for (; i + V::kWidth <= end; i += V::kWidth) body(i, V::kWidth);
  if (i < end) body(i, end - i);
}

/// The same by blocks of a state: `body(begin, end)`.
template <class Body>
TESSERA_ALWAYS_INLINE void for_blocks(std::size_t numel, const Body& body) {
  constexpr std::size_t kBlock = kStateBlock;
  for (std::size_t begin = 0; begin < numel; begin += kBlock) {
    body(begin, numel - begin < kBlock ? numel : begin + kBlock);
  }
}

template <class V>
TESSERA_ALWAYS_INLINE typename V::Bits noise_of(const StepArguments& a, std::size_t i) {
  const std::uint32_t first = (a.first_element + static_cast<std::uint32_t>(i)) * kNoiseStride;
  return noise_at(a.noise, V::lane_numbers() * kNoiseStride + first);
}

/// The states of a rule from its `k`th on. The first one's noise is an element's low 16 random bits, the second's the high;
/// a third is exact.
template <class V, class Rule, StateDType kDType, int k, bool kIsEnd = k == Rule::kStates>
class States : public States<V, Rule, kDType, k + 1> {
 public:
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using Later = States<V, Rule, kDType, k + 1>;
  using Stream = StateStream<V, kDType, Rule::kCodes[k]>;
  static constexpr bool kNoisyStore = Stream::kNoisyStore || Later::kNoisyStore;
  static constexpr bool kEncodesBlocks = Stream::kEncodesBlocks || Later::kEncodesBlocks;

  explicit TESSERA_ALWAYS_INLINE States(const StepArguments& a, float (*values)[kStateBlock])
      : Later(a, values), stream_(a.states[k], values[k]), is_kept_(a.states[k].data != nullptr) {}

  TESSERA_ALWAYS_INLINE void open(std::size_t begin) {
    if (is_kept()) stream_.open(begin);
    Later::open(begin);
  }
  TESSERA_ALWAYS_INLINE void load(std::size_t i, std::size_t count, Float* states) const {
    states[k] = is_kept() ? stream_.load(i, count) : Float{};
    Later::load(i, count, states);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const RuleElement<V, Rule::kStates>& next,
                                   Bits noise) {
    const bool keeps_root = Rule::kCodes[k] == StateCode::kRoot && Stream::kEncodesBlocks;
    if (is_kept()) stream_.store(i, count, keeps_root ? next.root : next.states[k], own(noise));
    Later::store(i, count, next, noise);
  }
  TESSERA_ALWAYS_INLINE void close(std::size_t begin) {
    if constexpr (Stream::kEncodesBlocks) {
      if (is_kept()) stream_.close(begin);
    }
    Later::close(begin);
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, Bits noise) const {
    if constexpr (Stream::kEncodesBlocks) {
      if (is_kept()) stream_.encode(i, count, own(noise));
    }
    Later::encode(i, count, noise);
  }

 private:
  TESSERA_ALWAYS_INLINE bool is_kept() const { return !Rule::kOptional[k] || is_kept_; }
  static TESSERA_ALWAYS_INLINE Bits own(Bits noise) { return k == 0 ? noise & 0xffffu : noise >> 16; }

  Stream stream_;
  const bool is_kept_;
};

template <class V, class Rule, StateDType kDType, int k>
class States<V, Rule, kDType, k, true> {
 public:
  using Float = typename V::Float;
  static constexpr bool kNoisyStore = false;
  static constexpr bool kEncodesBlocks = false;

  explicit TESSERA_ALWAYS_INLINE States(const StepArguments&, float (*)[kStateBlock]) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t) const {}
  TESSERA_ALWAYS_INLINE void load(std::size_t, std::size_t, Float*) const {}
  TESSERA_ALWAYS_INLINE void store(std::size_t, std::size_t, const RuleElement<V, Rule::kStates>&,
                                   typename V::Bits) const {}
  TESSERA_ALWAYS_INLINE void close(std::size_t) const {}
  TESSERA_ALWAYS_INLINE void encode(std::size_t, std::size_t, typename V::Bits) const {}
};

/// Moves a vector's averages, where there are some.
template <class V>
TESSERA_ALWAYS_INLINE void average(const AverageArgument& a, std::size_t i, std::size_t count, typename V::Float before,
                                   typename V::Float after) {
  if (a.values == nullptr) return;
  const typename V::Float old = V::stream(a.values + i, count);
  V::store(a.values + i, count, average_element(old, before, after, a.share, a.begins));
}

template <class V, class Rule, class Weights, StateDType kDType>
void update_loop(const typename Rule::Constants& constants, const StepArguments& arguments) {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using AllStates = States<V, Rule, kDType, 0>;
  const typename Rule::Constants c = constants;
  const StepArguments a = arguments;
  alignas(64) float values[Rule::kStates][kStateBlock];
  const Weights weights(a);
  AllStates states(a, values);

  for_blocks(a.numel, [&](std::size_t begin, std::size_t end) TESSERA_INLINE_BODY {
    states.open(begin);
    for_vectors<V>(begin, end, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
      const Float weight = weights.load(i, count);
      const Float gradient = scaled_gradient(V::stream(a.gradient + i, count), a.gradient_scale, a.clip_value);
      Float old[Rule::kStates];
      states.load(i, count, old);
      const RuleElement<V, Rule::kStates> next = Rule::template element<V>(c, gradient, weight, old);
      weights.store(i, count, next.weight);
      average<V>(a.average, i, count, weight, next.weight);
      states.store(i, count, next, AllStates::kNoisyStore ? noise_of<V>(a, i) : Bits{});
    });
    if constexpr (AllStates::kEncodesBlocks) {
      states.close(begin);
      for_vectors<V>(begin, end, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
        states.encode(i, count, noise_of<V>(a, i));
      });
    }
  });
}

template <class V, class Weights>
void read_loop(const StepArguments& arguments, float* masters) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_vectors<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    V::store(masters + i, count, weights.load(i, count));
  });
}

template <class V, class Weights>
void assign_loop(const StepArguments& arguments) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_vectors<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const typename V::Float before = weights.load(i, count), after = V::stream(a.gradient + i, count);
    weights.store(i, count, after);
    average<V>(a.average, i, count, before, after);
  });
}

template <class V, class Weights>
void average_loop(const StepArguments& arguments) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_vectors<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const typename V::Float weight = weights.load(i, count);
    average<V>(a.average, i, count, weight, weight);
  });
}

template <class V, class Weights>
void swap_loop(const StepArguments& arguments) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_vectors<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const typename V::Float weight = weights.load(i, count);
    weights.store(i, count, V::stream(a.average.values + i, count));
    V::store(a.average.values + i, count, weight);
  });
}

// The formats are chosen outside the loops, so that the loops have no branch on them.

template <class V, class Rule, class Weights>
void update_states(const typename Rule::Constants& c, const StepArguments& a) {
  switch (a.state_dtype) {
    case StateDType::kF32:
      return update_loop<V, Rule, Weights, StateDType::kF32>(c, a);
    case StateDType::kBF16:
      return update_loop<V, Rule, Weights, StateDType::kBF16>(c, a);
    case StateDType::k8Bit:
      return update_loop<V, Rule, Weights, StateDType::k8Bit>(c, a);
  }
}

/// Calls `body(weights)` with an object of the type that keeps weights so.
template <class V, class Body>
TESSERA_ALWAYS_INLINE void with_weights(const StepArguments& a, const Body& body) {
  switch (a.weights) {
    case WeightFormat::kF32:
      return body(F32Weights<V>(a));
    case WeightFormat::kF32AndF32:
      return body(F32CopiedWeights<V>(a));
    case WeightFormat::kF32AndBF16:
      return body(HalfCopiedWeights<V, false>(a));
    case WeightFormat::kF32AndF16:
      return body(HalfCopiedWeights<V, true>(a));
    case WeightFormat::kSplitBF16:
      return body(SplitWeights<V>(a));
  }
}

template <class V, class Rule>
void update(const RuleConstants& constants, const StepArguments& a) {
  with_weights<V>(
      a, [&]<class Weights>(const Weights&) { update_states<V, Rule, Weights>(constants_for(constants, Rule{}), a); });
}

template <class V>
void update_by_lars(const LarsConstants& constants, const StepArguments& a) {
  with_weights<V>(a, [&]<class Weights>(const Weights&) { update_states<V, LarsRule, Weights>(constants, a); });
}

template <class V>
void average_weights(const StepArguments& a) {
  with_weights<V>(a, [&]<class Weights>(const Weights&) { average_loop<V, Weights>(a); });
}

template <class V>
void read_weights(const StepArguments& a, float* masters) {
  with_weights<V>(a, [&]<class Weights>(const Weights&) { read_loop<V, Weights>(a, masters); });
}

template <class V>
void assign_weights(const StepArguments& a) {
  with_weights<V>(a, [&]<class Weights>(const Weights&) { assign_loop<V, Weights>(a); });
}

template <class V>
void swap_weights(const StepArguments& a) {
  with_weights<V>(a, [&]<class Weights>(const Weights&) { swap_loop<V, Weights>(a); });
}

template <class V>
inline constexpr StepLoops kStepLoops = {
    {update<V, AdamRule>, update<V, SgdRule>, update<V, LionRule>, update<V, AdagradRule>, update<V, RmspropRule>},
    update_states<V, MuonMomentumRule, F32Weights<V>>,
    update_states<V, LambDirectionRule, F32Weights<V>>,
    update_by_lars<V>,
    read_weights<V>,
    assign_weights<V>,
    average_weights<V>,
    swap_weights<V>};

#undef TESSERA_INLINE_BODY

}  // namespace
}  // namespace tessera
