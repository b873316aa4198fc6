#pragma once

#include "optim/arithmetic/average_element.h"
#include "optim/arithmetic/for_groups.h"
#include "optim/arithmetic/scaled_gradient.h"
#include "optim/loops/state_streams.h"
#include "optim/loops/step_loops.h"
#include "optim/loops/weight_streams.h"
#include "optim/rules/rules.h"

namespace tessera {
namespace {

// This file has the loops, for any vector type V, rule, weight format and state dtype. Elements are independent of each
// other, except for the scale of an 8-bit block. Each operation is rounded separately, or fused if that gives the same
// bits (Simd::add_multiple).

/// The noise of a run's elements, group by group. Its counter continues from group to group, which costs less than
/// starting it again for each group.
template <class V>
class NoiseRun {
 public:
  explicit TESSERA_ALWAYS_INLINE NoiseRun(const StepArguments& a) {
    for (int v = 0; v < V::kVectors; ++v) {
      constexpr std::uint32_t kRegister = V::kWidth / V::kVectors;
      places_[v] = (V::lane_numbers() + (a.first_element + kRegister * v)) * kNoiseStride + a.noise.start;
    }
  }
  TESSERA_ALWAYS_INLINE typename V::BitGroup next() {
    typename V::BitGroup noise;
    for (int v = 0; v < V::kVectors; ++v) {
      noise[v] = mix_noise(places_[v]);
      places_[v] += static_cast<std::uint32_t>(V::kWidth) * kNoiseStride;
    }
    return noise;
  }

 private:
  typename V::BitGroup places_;
};

/// The states of a rule from its `k`th on. A third state is exact (fp32), since the noise of an element is enough for
/// only two narrow states.
template <class V, class Rule, StateDType kDType, int k, bool kIsEnd = k == Rule::kStates>
class States : public States<V, Rule, kDType, k + 1> {
 public:
  using FloatGroup = typename V::FloatGroup;
  using BitGroup = typename V::BitGroup;
  using Elements = typename V::template Group<RuleElement<V, Rule::kStates>>;
  using Later = States<V, Rule, kDType, k + 1>;
  using Stream = StateStream<V, kDType, Rule::kCodes[k]>;
  static constexpr int kNarrowStates = (Stream::kIsNarrow ? 1 : 0) + Later::kNarrowStates;
  static constexpr bool kIsNarrow = kNarrowStates > 0;

  explicit TESSERA_ALWAYS_INLINE States(const StepArguments& a, float (*values)[kKeptValues])
      : Later(a, values), stream_(a.states[k], values[k]), is_kept_(a.states[k].data != nullptr) {}

  TESSERA_ALWAYS_INLINE void open(std::size_t begin, std::size_t end) {
    if (is_kept()) stream_.open(begin, end);
    Later::open(begin, end);
  }
  TESSERA_ALWAYS_INLINE void load(std::size_t i, std::size_t count, FloatGroup* states) const {
    states[k] = is_kept() ? stream_.load(i, count) : FloatGroup{};
    Later::load(i, count, states);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const Elements& next) {
    FloatGroup values;
    for (int v = 0; v < V::kVectors; ++v) values[v] = Stream::kKeepsRoot ? next[v].root : next[v].states[k];
    if (is_kept()) stream_.store(i, count, values);
    Later::store(i, count, next);
  }
  TESSERA_ALWAYS_INLINE void close(std::size_t begin) {
    if constexpr (Stream::kIsNarrow) {
      if (is_kept()) stream_.close(begin);
    }
    Later::close(begin);
  }
  /// Clears the noise where a new value is a NaN, since the noise would turn the NaN into a number.
  TESSERA_ALWAYS_INLINE void spare_nans(std::size_t i, BitGroup& noise) const {
    static_assert(kNarrowStates <= 2, "a third one's values would have to be looked at too");
    if constexpr (kDType == StateDType::kBF16 && kIsNarrow) {
      if (!Stream::kIsNarrow || !is_kept()) return Later::spare_nans(i, noise);
      const FloatGroup values = narrow_or(i, {}), later = Later::narrow_or(i, values);
      for (int v = 0; v < V::kVectors; ++v) noise[v] = V::where_ordered(noise[v], values[v], later[v]);
    }
  }
  /// Returns the new values of the next narrow state, or `other` if there is none.
  TESSERA_ALWAYS_INLINE FloatGroup narrow_or(std::size_t i, const FloatGroup& other) const {
    if constexpr (Stream::kIsNarrow) {
      if (is_kept()) return stream_.kept(i);
    }
    return Later::narrow_or(i, other);
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, const BitGroup& noise) const {
    if constexpr (Stream::kIsNarrow) {
      BitGroup own;
      for (int v = 0; v < V::kVectors; ++v) own[v] = own_noise<k == 0, Stream::kNoiseBits>(noise[v]);
      if (is_kept()) stream_.encode(i, count, own);
    }
    Later::encode(i, count, noise);
  }

 private:
  TESSERA_ALWAYS_INLINE bool is_kept() const { return !Rule::kOptional[k] || is_kept_; }

  Stream stream_;
  const bool is_kept_;
};

/// Ends the recursion over a rule's states: no states are left.
template <class V, class Rule, StateDType kDType, int k>
class States<V, Rule, kDType, k, true> {
 public:
  static constexpr int kNarrowStates = 0;

  explicit TESSERA_ALWAYS_INLINE States(const StepArguments&, float (*)[kKeptValues]) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t, std::size_t) const {}
  TESSERA_ALWAYS_INLINE void load(std::size_t, std::size_t, typename V::FloatGroup*) const {}
  TESSERA_ALWAYS_INLINE void store(std::size_t, std::size_t,
                                   const typename V::template Group<RuleElement<V, Rule::kStates>>&) const {}
  TESSERA_ALWAYS_INLINE void close(std::size_t) const {}
  TESSERA_ALWAYS_INLINE void spare_nans(std::size_t, typename V::BitGroup&) const {}
  TESSERA_ALWAYS_INLINE typename V::FloatGroup narrow_or(std::size_t, const typename V::FloatGroup& other) const {
    return other;
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t, std::size_t, const typename V::BitGroup&) const {}
};

/// Updates a group's averages, if there are any.
template <class V>
TESSERA_ALWAYS_INLINE void average(const AverageArgument& a, std::size_t i, std::size_t count,
                                   const typename V::FloatGroup& before, const typename V::FloatGroup& after) {
  if (a.values == nullptr) return;
  typename V::FloatGroup values = V::stream(a.values + i, count);
  for (int v = 0; v < V::kVectors; ++v) values[v] = average_element(values[v], before[v], after[v], a.share, a.start);
  V::store(a.values + i, count, values);
}

/// Computes the rule's formula for a group of elements.
template <class V, class Rule>
TESSERA_ALWAYS_INLINE typename V::template Group<RuleElement<V, Rule::kStates>> elements(
    const typename Rule::Constants& c, const StepArguments& a, const typename V::FloatGroup& gradient,
    const typename V::FloatGroup& weight, const typename V::FloatGroup* states) {
  typename V::template Group<RuleElement<V, Rule::kStates>> next;
  for (int v = 0; v < V::kVectors; ++v) {
    typename V::Float old[Rule::kStates];
    for (int k = 0; k < Rule::kStates; ++k) old[k] = states[k][v];
    const auto g = scaled_gradient(gradient[v], a.gradient_scale, a.clip_value);
    next[v] = Rule::template element<V>(c, g, weight[v], old);
  }
  return next;
}

/// If a format is narrow, the loop goes through a block twice. The formula leaves its new values in the first-level
/// cache. The code that narrows these values reads them from there, while the next block's formula is computed. A
/// processor looks ahead a few hundred instructions. If each group were narrowed directly after its formula, there
/// would be one chain of dependent operations from load to store. This chain would have too few square roots and
/// divisions to keep the processor busy. Two passes make two chains (formula and narrowing), which do not wait for each
/// other.
///
/// `kIsUsual`: Rule::is_usual is true for the constants, and the step has neither clipping by value nor averages. The
/// loops then need no branches for these cases.
template <class V, class Rule, class Weights, StateDType kDType, bool kIsUsual>
void update_loop(const typename Rule::Constants& constants, const StepArguments& arguments) {
  using FloatGroup = typename V::FloatGroup;
  using AllStates = States<V, Rule, kDType, 0>;
  constexpr bool kIsNarrow = Weights::kIsNarrow || AllStates::kIsNarrow;
  typename Rule::Constants c = constants;
  StepArguments a = arguments;
  if constexpr (kIsUsual) {
    Rule::make_usual(c);
    a.clip_value = 0.0f;
    a.average.values = nullptr;
  }
  alignas(64) float values[Rule::kStates][kKeptValues], new_weights[kKeptValues];
  const BlockValues<V> kept_weights{new_weights};
  const Weights weights(a);
  AllStates states(a, values);
  NoiseRun<V> noise(a);

  const auto move = [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const FloatGroup weight = weights.load(i, count), gradient = V::stream(a.gradient + i, count);
    FloatGroup old[Rule::kStates], moved;
    states.load(i, count, old);
    const auto next = elements<V, Rule>(c, a, gradient, weight, old);
    for (int v = 0; v < V::kVectors; ++v) moved[v] = next[v].weight;
    if constexpr (Weights::kIsNarrow) {
      kept_weights.keep(i, moved);
    } else {
      weights.store(i, count, moved);
    }
    average<V>(a.average, i, count, weight, moved);
    states.store(i, count, next);
  };
  const auto make_narrow = [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    if constexpr (Weights::kIsNarrow) weights.store(i, count, kept_weights.kept(i));
    if constexpr (AllStates::kIsNarrow) {
      typename V::BitGroup own = noise.next();
      states.spare_nans(i, own);
      states.encode(i, count, own);
    }
  };

  if constexpr (!kIsNarrow) {
    for_groups<V>(0, a.numel, move);
  } else {
    // Each body is used in as few places as possible, since the compiler copies it for each place, rule and format.
    constexpr std::size_t kBlock = kStateBlock;
    std::size_t narrow = 0;  // number of elements that are narrowed already
    for (std::size_t begin = 0;; begin += kBlock) {
      const std::size_t left = begin < a.numel ? a.numel - begin : 0, end = begin + (left < kBlock ? left : kBlock);
      if (left > 0) states.open(begin, end);
      if (begin > narrow && left >= kBlock) {
        for (; narrow < begin; narrow += V::kWidth) {
          move(narrow + kBlock, V::kWidth);
          make_narrow(narrow, V::kWidth);
        }
      } else {
        for_groups<V>(narrow, left > 0 ? begin : a.numel, make_narrow);
        if (left == 0) break;
        narrow = begin;
        for_groups<V>(begin, end, move);
      }
      states.close(begin);
    }
  }
}

/// Writes the masters to `masters` [numel].
template <class V, class Weights>
void read_loop(const StepArguments& arguments, float* masters) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_groups<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    V::store(masters + i, count, weights.load(i, count));
  });
}

/// Copies the new masters from the gradient's memory, and updates the averages.
template <class V, class Weights>
void assign_loop(const StepArguments& arguments) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_groups<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const typename V::FloatGroup before = weights.load(i, count), after = V::stream(a.gradient + i, count);
    weights.store(i, count, after);
    average<V>(a.average, i, count, before, after);
  });
}

/// Updates the averages of weights that a step does not change.
template <class V, class Weights>
void average_loop(const StepArguments& arguments) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_groups<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const typename V::FloatGroup weight = weights.load(i, count);
    average<V>(a.average, i, count, weight, weight);
  });
}

/// Exchanges weights and their averages.
template <class V, class Weights>
void swap_loop(const StepArguments& arguments) {
  const StepArguments a = arguments;
  const Weights weights(a);
  for_groups<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const typename V::FloatGroup weight = weights.load(i, count);
    weights.store(i, count, V::stream(a.average.values + i, count));
    V::store(a.average.values + i, count, weight);
  });
}

// The formats are selected outside the loops, so that the loops have no branch for them.

template <class V, class Rule, class Weights, StateDType kDType>
void update_usual_or_any(const typename Rule::Constants& c, const StepArguments& a) {
  if constexpr (requires { Rule::make_usual; }) {
    const bool is_usual = Rule::is_usual(c) && !(a.clip_value > 0.0f) && a.average.values == nullptr;
    if (is_usual) return update_loop<V, Rule, Weights, kDType, true>(c, a);
  }
  update_loop<V, Rule, Weights, kDType, false>(c, a);
}

template <class V, class Rule, class Weights>
void update_states(const typename Rule::Constants& c, const StepArguments& a) {
  switch (a.state_dtype) {
    case StateDType::kF32:
      return update_usual_or_any<V, Rule, Weights, StateDType::kF32>(c, a);
    case StateDType::kBF16:
      return update_usual_or_any<V, Rule, Weights, StateDType::kBF16>(c, a);
    case StateDType::k8Bit:
      return update_usual_or_any<V, Rule, Weights, StateDType::k8Bit>(c, a);
  }
}

/// Calls `body(weights)` with an object of the type for this format of weights.
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
  if constexpr (kIsOfDirections<Rule>) {
    update_states<V, Rule, F32Weights<V>>(constants_for(constants, Rule{}), a);
  } else {
    with_weights<V>(a, [&]<class Weights>(const Weights&) {
      update_states<V, Rule, Weights>(constants_for(constants, Rule{}), a);
    });
  }
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

#define TESSERA_UPDATE(enumerator, Rule) update<V, Rule>,
template <class V>
inline constexpr StepLoops kStepLoops = {{TESSERA_STEP_RULES(TESSERA_UPDATE)},
                                         update_states<V, MuonMomentumRule, F32Weights<V>>,
                                         read_weights<V>,
                                         assign_weights<V>,
                                         average_weights<V>,
                                         swap_weights<V>};
#undef TESSERA_UPDATE

}  // namespace
}  // namespace tessera
