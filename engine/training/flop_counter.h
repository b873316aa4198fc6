#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <string_view>

namespace tessera {

/// Counts the floating-point operations of operators while it lives (flop_formula_of): forward, backward and
/// recomputation. A Training makes a FlopCounter for its first step and drops it when backward has ended, so later
/// steps cost nothing.
///
/// A FlopCounter is an at::RecordFunction callback. It counts the operators of the thread that made it, and of threads
/// that never made a FlopCounter, such as autograd's threads for a GPU. So ranks that are threads of one process do not
/// count each other's operations. An operator inside a counted one is not counted again. Tessera's own operators
/// (Unrecorded) are not counted.
class FlopCounter {
 public:
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  std::int64_t counted() const;
  /// Sets the count to 0.
  void clear();

  /// The end of a Pause sets `counter` to the count that it had at the beginning, since an evaluation does not belong
  /// to a step. `counter` may be null; nothing happens then.
  class Pause {
   public:
    explicit Pause(FlopCounter* counter);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    FlopCounter* const counter_;
    const std::int64_t before_;
  };

 private:
  struct Count;
  std::unique_ptr<Count> count_;
};

/// The floating-point operations of one call of an operator, from its inputs in the order of its schema. A
/// multiplication and an addition count as two operations. FlopCounter is the caller.
using FlopFormula = std::int64_t (*)(c10::ArrayRef<c10::IValue> inputs);

/// Returns the formula of an operator such as "aten::mm", or null if the operator is not counted. The counted operators
/// are those of torch.utils.flop_counter: products of matrices, convolutions, scaled dot-product attention, and the
/// backward of these. All else (elementwise operators, norms, embeddings, products with a vector) counts as nothing.
FlopFormula flop_formula_of(std::string_view operation);

}  // namespace tessera
