#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <vector>

#include "optim/arithmetic/instruction_set.h"
#include "runtime/base/state_dtype.h"
#include "tessera/dtype.h"
#include "workshop/bench/pass_timing.h"

namespace tessera {

/// A case that is timed on the CPU and on a GPU. Its bf16 parameters have split masters.
struct OptimizerCase {
  const char* name;
  DType param;
  StateDType state;
  bool mixed() const { return param == DType::kBF16; }
};
inline constexpr OptimizerCase kOptimizerCases[] = {{"fp32", DType::kF32, StateDType::kF32},
                                                    {"mixed", DType::kBF16, StateDType::kF32},
                                                    {"mixed_bf16_moments", DType::kBF16, StateDType::kBF16},
                                                    {"mixed_8bit_moments", DType::kBF16, StateDType::k8Bit}};
/// Cases for the CPU only. They are fp32 except for the moments, so a comparison with "fp32" shows only the gain and
/// the cost of narrow moments.
inline constexpr OptimizerCase kMomentCases[] = {{"fp32_bf16_moments", DType::kF32, StateDType::kBF16},
                                                 {"fp32_8bit_moments", DType::kF32, StateDType::k8Bit}};

/// Times an optimizer's steps over a flat run of parameters, on one thread. The limit is a loop that only reads and
/// writes the same bytes in place. The names of the cases:
///
///   fp32                                  AdamW on fp32 parameters
///   fp32_bf16_moments, fp32_8bit_moments  the same with narrower moments
///   mixed, mixed_bf16_moments,            compute the gradients' norm and finite flag first; then unscale, clip,
///   mixed_8bit_moments                    update split masters and write bf16 parameters
///
/// All cases are timed, interleaved, `rounds` times after one round of warm-up. `numel` is rounded up to a multiple of
/// 256. `set`: the loops that are used. REQUIRES: supports(set).
std::vector<PassTiming> bench_optimizer(std::size_t numel, int rounds, InstructionSet set = best_instruction_set());

/// Makes the measurements of bench_optimizer on the current GPU. A step is the norm (if the case has one), the decision
/// and the pass, and the limit is a copy of as many bytes, half of them read and half of them written. Times are those
/// of CUDA events. Errors: 69 without a GPU, or in a build without kernels; those of CUDA.
absl::StatusOr<std::vector<PassTiming>> bench_device_optimizer(std::size_t numel, int rounds);

}  // namespace tessera
