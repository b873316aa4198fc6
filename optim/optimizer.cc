#include "optim/optimizer.h"

#include <fmt/format.h>

#include <stdexcept>
#include <tuple>

#include "optim/adamw.h"
#include "optim/optimizer_checks.h"
#include "optim/sgd.h"

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

void check_state(std::string_view optimizer, std::string_view what, const StateSlice& state, StateBytes wanted) {
  check_length(optimizer, what, state.data.size(), static_cast<std::size_t>(wanted.data), "bytes");
  check_length(optimizer, fmt::format("{} scales", what), state.scales.size_bytes(),
               static_cast<std::size_t>(wanted.scales), "bytes");
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

}  // namespace

StepArguments check_slice(std::string_view optimizer, int num_states, StateDType states, std::int64_t step,
                          const OptimizerSlice& slice) {
  const std::size_t numel = slice.gradient.size();
  const bool split = slice.master_kind == MasterKind::kSplitBF16;
  check_length(optimizer, "master", slice.master.size(), split ? 0 : numel);
  check_length(optimizer, "low", slice.low.size(), split ? numel : 0);
  const StateBytes bytes = state_bytes(states, static_cast<std::int64_t>(numel));
  check_state(optimizer, "state0", slice.state0, num_states >= 1 ? bytes : StateBytes{});
  check_state(optimizer, "state1", slice.state1, num_states >= 2 ? bytes : StateBytes{});
  if (states == StateDType::k8Bit && slice.first_element % kStateBlock != 0) {
    refuse(optimizer, fmt::format("a slice with 8-bit states begins at a multiple of {} elements, got {}", kStateBlock,
                                  slice.first_element));
  }
  return {.numel = numel,
          .gradient = slice.gradient.data(),
          .master = slice.master.data(),
          .low = slice.low.data(),
          .parameter = slice.parameter,
          .state0 = {slice.state0.data.data(), slice.state0.scales.data()},
          .state1 = {slice.state1.data.data(), slice.state1.scales.data()},
          .weights = weight_format(optimizer, slice),
          .states = states,
          .noise = noise_key(slice.stream, step),
          .first_element = static_cast<std::uint32_t>(slice.first_element)};
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config) {
  switch (config.type) {
    case OptimizerType::kAdamW:
    case OptimizerType::kAdam:
      return std::make_unique<AdamW>(config);
    case OptimizerType::kSgd:
      return std::make_unique<Sgd>(config);
  }
  throw std::invalid_argument("make_optimizer: unknown optimizer type");
}

OptimizerConfig config_of(const OptimizerConfig& optimizer, const ParameterGroup& group) {
  OptimizerConfig config = optimizer;
  config.groups.clear();
  config.weight_decay = group.weight_decay.value_or(optimizer.weight_decay);
  config.eps = group.eps.value_or(optimizer.eps);
  if (group.betas) std::tie(config.beta1, config.beta2) = *group.betas;
  return config;
}

}  // namespace tessera
