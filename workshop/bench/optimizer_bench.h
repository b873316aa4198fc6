#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "optim/arithmetic/instruction_set.h"
#include "runtime/base/state_dtype.h"
#include "tessera/dtype.h"
#include "workshop/bench/samples.h"

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

/// The times of one optimizer step over a flat run of `numel` parameters, on one thread. `limit` has the times of a
/// loop that only reads and writes the same bytes in place.
struct OptimizerTiming {
  /// "fp32": AdamW on fp32 parameters. "fp32_bf16_moments" and "fp32_8bit_moments" differ from it only in their
  /// moments. The other cases compute the gradients' norm and finite flag first. Then they unscale, clip, update split
  /// masters and write bf16 parameters: "mixed" with fp32 moments, "mixed_bf16_moments", "mixed_8bit_moments".
  std::string name;
  std::size_t numel = 0;
  std::size_t bytes = 0;  ///< bytes read and written
  Samples step, limit;
};

/// Times all cases, interleaved, `rounds` times after one round of warm-up. `numel` is rounded up to a multiple of 256.
/// `set`: the loops that are used. REQUIRES: supports(set).
std::vector<OptimizerTiming> bench_optimizer(std::size_t numel, int rounds,
                                             InstructionSet set = best_instruction_set());

/// Returns {"cases": [{"name", "numel", "bytes", "samples_s", "median_s", "limit_s", "of_limit"}]}
nlohmann::json to_json(const std::vector<OptimizerTiming>& timings);

/// Makes the measurements of bench_optimizer on the current GPU. A step is the norm (if the case has one), the decision
/// and the pass, and the limit is a copy of as many bytes, half of them read and half of them written. Times are those
/// of CUDA events. Errors: 69 without a GPU, or in a build without kernels; those of CUDA.
absl::StatusOr<std::vector<OptimizerTiming>> bench_device_optimizer(std::size_t numel, int rounds);

}  // namespace tessera
