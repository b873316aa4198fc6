#include "optim/optimizer.h"

#include <fmt/format.h>

#include <stdexcept>

#include "optim/adamw.h"
#include "optim/optimizer_checks.h"
#include "optim/sgd.h"

namespace tessera {
namespace {

void check_length(std::string_view optimizer, std::string_view what, std::size_t got, std::size_t wanted) {
  if (got == wanted) return;
  throw std::invalid_argument(fmt::format("{}: the slice's {} wants {} elements, got {}", optimizer, what, wanted, got));
}

}  // namespace

void check_slice(std::string_view optimizer, int num_states, const OptimizerSlice& slice) {
  const std::size_t numel = slice.master.size();
  check_length(optimizer, "gradient", slice.gradient.size(), numel);
  if (num_states >= 1) check_length(optimizer, "state0", slice.state0.size(), numel);
  if (num_states >= 2) check_length(optimizer, "state1", slice.state1.size(), numel);
  const DType dtype = slice.parameter_dtype;
  if (slice.parameter != nullptr && dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
    throw std::invalid_argument(
        fmt::format("{}: parameters can be fp32, bf16 or fp16, got {}", optimizer, name_of(dtype)));
  }
}

double power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) result *= base;
  }
  return result;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config) {
  switch (config.type) {
    case OptimizerType::kAdamW:
    case OptimizerType::kAdam: return std::make_unique<AdamW>(config);
    case OptimizerType::kSgd: return std::make_unique<Sgd>(config);
  }
  throw std::invalid_argument("make_optimizer: unknown optimizer type");
}

}  // namespace tessera
