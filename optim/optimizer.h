#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/base/dtype.h"
#include "runtime/base/strategy.h"

namespace tessera {

/// What one step needs beside the tensors. All parameters of a step share them.
struct StepScalars {
  float gradient_scale = 1.0f;  ///< every gradient is multiplied by it: clip / (ranks * microbatches * loss scale)
  float lr = 0.0f;
  std::int64_t step = 1;        ///< counts applied steps from 1: bias correction
};

/// A contiguous run of `n` parameters and everything the optimizer keeps for them.
struct OptimizerSlice {
  std::span<float> master;          ///< [n] fp32, updated in place
  std::span<const float> gradient;  ///< [n] fp32: sums over ranks and microbatches, not yet scaled
  std::span<float> state0;          ///< [n] fp32: first moment, or momentum buffer; empty if num_states() < 1
  std::span<float> state1;          ///< [n] fp32: second moment; empty if num_states() < 2
  void* parameter = nullptr;        ///< [n] of parameter_dtype: receives the rounded master; null if master *is* it
  DType parameter_dtype = DType::kF32;
};

/// Element-wise update of a flat run of parameters, one pass: scale the gradient, update state and master, round into
/// the parameter's dtype (nearest even). The result for an element depends on nothing but that element's values and the
/// scalars: not on where a run begins, on the instruction set, nor on threads. So shards may be cut anywhere.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// fp32 numbers kept a parameter beside the master: adam 2, sgd with momentum 1, sgd 0.
  virtual int num_states() const = 0;
  /// "exp_avg", "exp_avg_sq", "momentum_buffer": as PyTorch names them.
  virtual std::string state_name(int index) const = 0;
  virtual void step(const StepScalars& scalars, const OptimizerSlice& slice) const = 0;
};

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config);

}  // namespace tessera
