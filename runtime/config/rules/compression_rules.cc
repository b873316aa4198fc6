#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

// This file has the checks of the settings that "compression" needs and of those that it excludes.

namespace tessera {
namespace {

/// Returns the optimizer's smallest momentum among all groups, and its key. It returns infinity if the program decides
/// the momentum. It returns nothing for rules that always square single gradients, or take their norms.
std::optional<std::pair<double, const char*>> least_momentum(const OptimizerConfig& optimizer) {
  switch (optimizer.type) {
    case OptimizerType::kOwn:
      return {{std::numeric_limits<double>::infinity(), ""}};
    case OptimizerType::kSgd:
      return {{optimizer.momentum, "momentum"}};
    case OptimizerType::kAdamW:
    case OptimizerType::kAdam:
    case OptimizerType::kLion: {
      double least = optimizer.beta1;
      for (const ParameterGroup& group : optimizer.groups) {
        if (group.betas) least = std::min(least, group.betas->first);
      }
      return {{least, "betas[0]"}};
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

std::vector<StrategyRule> compression_rules() {
  return {
      {{"/compression/error_feedback", "/mixed_precision/param"},
       "compression.error_feedback goes without mixed_precision.param fp16.",
       [](const Strategy& s) -> std::string {
         if (!s.compression.error_feedback || s.mixed_precision.param != DType::kF16) return "";
         return "what rounding took from gradients scaled for fp16 does not fit the next scale. [T0539] hint: leave "
                "it out, or take bf16";
       }},
      // The rounding error of a single gradient is 1 / (1 - momentum) times as large as that of the momentum which the
      // method sends. The optimizer's own momentum undoes this factor.
      {{"/compression/method", "/compression/start_step", "/optimizer/type", "/optimizer/freeze_step",
        "/optimizer/momentum", "/optimizer/betas", "/optimizer/groups", "/gradient_clip_value"},
       "The momentum of a compression.method of type one_bit is at most the optimizer's: sgd's momentum, betas[0] of "
       "lion, adamw and adam, of which the latter's second moments stay when it begins (freeze_step above 0, and "
       "start_step not below it). It goes with these and with the program's own, and without gradient_clip_value.",
       [](const Strategy& s) -> std::string {
         const double momentum = momentum_of_residuals(s.compression.method);
         if (momentum == 0) return "";
         const OptimizerConfig& optimizer = s.optimizer;
         const auto least = least_momentum(optimizer);
         if (!least) {
           return fmt::format(
               "has momentum, which makes single gradients too wrong for {}, which squares or measures them. [T0540] "
               "hint: take adamw with freeze_step, lion or sgd",
               name_of(optimizer.type));
         }
         if (momentum > least->first)
           return fmt::format(
               "has momentum {}, and the optimizer's {} is {}: that would not take back what rounding does to single "
               "gradients. [T0541] hint: give both the same",
               momentum, least->second, least->first);
         if (s.gradient_clip_value > 0)
           return "has momentum, which makes single gradients too wrong to be cut by gradient_clip_value. [T0542] "
                  "hint: leave that out, or take gradient_clipping";
         if (optimizer.type != OptimizerType::kAdamW && optimizer.type != OptimizerType::kAdam) return "";
         if (optimizer.freeze_step == 0)
           return "has momentum, which makes single gradients too wrong to be squared. [T0543] hint: set "
                  "optimizer.freeze_step to the steps after which second moments stay as they are, and "
                  "compression.start_step to the same number";
         if (s.compression.start_step >= optimizer.freeze_step) return "";
         return fmt::format(
             "has momentum and begins after {} steps, and second moments stay after {}: in between they would square "
             "gradients that are too wrong for it. [T0544] hint: give start_step the number of freeze_step",
             s.compression.start_step, optimizer.freeze_step);
       }},
      // If parameters stayed in memory, the next update would read rounded parameters.
      {{"/compression/gathers", "/strategy", "/placement/parameters"},
       "compression.gathers int8 and int4 go with strategy FULL_SHARD and HYBRID_SHARD.",
       [](const Strategy& s) -> std::string {
         if (!is_lossy(s.compression.gathers) || releases_parameters(s)) return "";
         return fmt::format(
             "is {}, and under {} what ranks get from each other stays in memory and is updated there. [T0545] "
             "hint: take lossless, or FULL_SHARD (or by \"placement\" cut parameters over \"rank\")",
             name_of(s.compression.gathers), name_of_placement(s));
       }},
      // Methods make sums of their own, which these combinations would change.
      {{"/compression/method", "/compression/gradients", "/compression/sums", "/mixed_precision/param",
        "/mixed_precision/reduce", "/mesh/replicate", "/mesh/host"},
       "A compression.method other than none goes with mixed_precision.reduce fp32, without param fp16, on a mesh of "
       "one replica, and with compression.gradients and compression.sums none.",
       [](const Strategy& s) -> std::string {
         if (!s.compression.has_method()) return "";
         if (s.compression.gradients != WireForm::kPlain || s.compression.sums != WireForm::kPlain)
           return "cannot stand beside \"gradients\" or \"sums\" in fewer bits. [T0546] hint: give one or the other";
         if (s.mixed_precision.param == DType::kF16)
           return "would see and keep gradients times a loss scale, which changes under fp16. [T0547] hint: take bf16";
         if (s.mixed_precision.reduce != DType::kF32)
           return fmt::format("sends fp32, and mixed_precision.reduce is {}. [T0548] hint: leave that out",
                              name_of(s.mixed_precision.reduce));
         if (s.mesh.replicas() > 1)
           return fmt::format(
               "needs one replica, whose ranks sum all gradients at once, got {}. [T0549] hint: leave \"mesh\" out",
               s.mesh.replicas());
         return "";
       }}};
}

}  // namespace tessera
