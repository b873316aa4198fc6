#include "optim/rule_optimizer.h"

#include <fmt/format.h>

#include <stdexcept>

#include "runtime/base/seeded_fault.h"
#include "runtime/config/optimizer_rows.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(std::string_view optimizer, const std::string& what) {
  throw std::invalid_argument(fmt::format("{}: {}", optimizer, what));
}

void check_length(std::string_view optimizer, std::string_view what, std::size_t got, std::size_t wanted,
                  std::string_view unit = "elements") {
  if (got == wanted) return;
  refuse(optimizer, fmt::format("the slice's {} wants {} {}, got {}", what, wanted, unit, got));
}

/// Throws if a state does not fit. Names are built only for an error, so a usual step allocates no memory.
void check_state(std::string_view optimizer, std::size_t index, const std::vector<StateInfo>& states,
                 const StateSlice& state, std::size_t numel) {
  const bool exists = index < states.size();
  const StateBytes wanted = exists ? state_bytes(states[index].dtype, static_cast<std::int64_t>(numel)) : StateBytes{};
  const auto data = static_cast<std::size_t>(wanted.data), scales = static_cast<std::size_t>(wanted.scales);
  if (state.data.size() == data && state.scales.size_bytes() == scales) return;
  const std::string name = exists ? states[index].name : fmt::format("state {}", index);
  check_length(optimizer, name, state.data.size(), data, "bytes");
  check_length(optimizer, name + " scales", state.scales.size_bytes(), scales, "bytes");
}

WeightFormat weight_format(std::string_view optimizer, const OptimizerSlice& slice) {
  const DType dtype = slice.parameter_dtype;
  if (slice.master_kind == MasterKind::kSplitBF16) {
    if (slice.parameter != nullptr && dtype == DType::kBF16) return WeightFormat::kSplitBF16;
    refuse(optimizer, fmt::format("a split master needs its bf16 parameter, got {} at {}", name_of(dtype),
                                  fmt::ptr(slice.parameter)));
  }
  if (slice.parameter == nullptr) return WeightFormat::kF32;
  if (dtype == DType::kF32) return WeightFormat::kF32AndF32;
  if (dtype == DType::kBF16) return WeightFormat::kF32AndBF16;
  if (dtype == DType::kF16) return WeightFormat::kF32AndF16;
  refuse(optimizer, fmt::format("parameters can be fp32, bf16 or fp16, got {}", name_of(dtype)));
}

bool is_decoupled(OptimizerType type) {
  return type == OptimizerType::kAdamW || type == OptimizerType::kLamb || has(type, optimizer_traits::kMatrices);
}

/// One state of a rule: its index, its name, and its code.
struct Kept {
  int place;
  const char* name;
  StateCode code;
};

std::vector<Kept> kept_by(StepRule rule, const RuleNumbers& numbers) {
  return with_rule(rule, [&]<class Rule>() {
    std::vector<Kept> kept;
    for (int place = 0; place < Rule::kStates; ++place) {
      if constexpr (requires { &Rule::keeps; }) {
        if (Rule::kOptional[place] && !Rule::keeps(numbers, place)) continue;
      }
      kept.push_back({place, Rule::kNames[place], Rule::kCodes[place]});
    }
    return kept;
  });
}

}  // namespace

StepRule rule_of(OptimizerType type) {
  if (type == OptimizerType::kAdamW || has(type, optimizer_traits::kMatrices)) return StepRule::kAdam;
  switch (type) {
#define TESSERA_CASE(enumerator, Rule) \
  case OptimizerType::enumerator:      \
    return StepRule::enumerator;
    TESSERA_STEP_RULES(TESSERA_CASE)
#undef TESSERA_CASE
    default:
      throw std::invalid_argument("make_optimizer: unknown optimizer type");
  }
}

RuleNumbers rule_numbers(const OptimizerConfig& config) {
  return {.beta1 = config.beta1,
          .beta2 = config.beta2,
          .eps = config.eps,
          .weight_decay = config.weight_decay,
          .momentum = config.momentum,
          .dampening = config.dampening,
          .alpha = config.alpha,
          .lr_decay = config.lr_decay,
          .freeze_step = config.freeze_step,
          .is_decoupled = is_decoupled(config.type),
          .is_nesterov = config.nesterov,
          .is_centered = config.centered};
}

RuleOptimizer::RuleOptimizer(const OptimizerConfig& config, const EmaConfig& ema, InstructionSet set)
    : name_(name_of(config.type)),
      rule_(rule_of(config.type)),
      numbers_(rule_numbers(config)),
      state_dtype_(config.state_dtype),
      average_share_(ema.decay > 0.0 ? static_cast<float>(1.0 - ema.decay) : 0.0f),
      loops_(&step_loops(set)) {
  for (const Kept& kept : kept_by(rule_, numbers_)) {
    if (kept.code == StateCode::kExact && state_dtype_ != StateDType::kF32) {
      refuse(name_, fmt::format("{} needs states in fp32", kept.name));
    }
    states_.push_back({kept.name, state_dtype_});
    places_.push_back(kept.place);
  }
  if (average_share_ > 0.0f) states_.push_back({"ema", StateDType::kF32});
}

StepArguments RuleOptimizer::arguments(const OptimizerSlice& slice) const {
  const std::size_t numel = slice.gradient.size();
  const bool split = slice.master_kind == MasterKind::kSplitBF16;
  check_length(name_, "master", slice.master.size(), split ? 0 : numel);
  check_length(name_, "low", slice.low.size(), split ? numel : 0);
  for (std::size_t i = 0; i < kMostStates; ++i) {
    check_state(name_, i, states_, slice.states[i], numel);
  }
  if (state_dtype_ == StateDType::k8Bit && !places_.empty() && slice.first_element % kStateBlock != 0) {
    refuse(name_, fmt::format("a slice with 8-bit states begins at a multiple of {} elements, got {}", kStateBlock,
                              slice.first_element));
  }
  StepArguments a;
  a.numel = numel;
  a.gradient = slice.gradient.data();
  a.master = slice.master.data();
  a.low = slice.low.data();
  a.parameter = slice.parameter;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    a.states[places_[i]] = {slice.states[i].data.data(), slice.states[i].scales.data()};
  }
  if (average_share_ > 0.0f) {
    a.average = {reinterpret_cast<float*>(slice.states[places_.size()].data.data()), average_share_};
  }
  a.weights = weight_format(name_, slice);
  a.state_dtype = state_dtype_;
  a.first_element = static_cast<std::uint32_t>(slice.first_element);
  return a;
}

void RuleOptimizer::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  if (makes_direction(rule_)) refuse(name_, "a step has two passes (LayerwiseOptimizer)");
  StepArguments a = arguments(slice);
  a.gradient_scale = scalars.gradient_scale;
  a.clip_value = scalars.clip_value;
  a.average.start = average_start(scalars.step, scalars.is_first_of_run);
  a.noise = noise_key(slice.stream, scalars.step);
  const std::int64_t step = scalars.step + (seeded_fault(SeededFault::kBiasCorrectionOneAhead) ? 1 : 0);
  loops_->update[static_cast<int>(rule_)](rule_constants(rule_, numbers_, step, scalars.lr), a);
}

void RuleOptimizer::average(const OptimizerSlice& slice) const {
  if (average_share_ > 0.0f) loops_->average(arguments(slice));
}

}  // namespace tessera
