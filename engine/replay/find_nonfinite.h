#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

namespace tessera {

/// The place from which a number that is not finite came.
struct NonfiniteResult {
  std::string op;     ///< name of the operator, such as "aten::mul"
  std::string where;  ///< "forward", or the node of the graph: "MulBackward0, in backward"
  std::string unit;   ///< the unit whose parameters the operator reads, else the unit that was read last; empty if
                      ///< there was none
  bool reads_parameters = false;
  bool had_bad_input = false;  ///< whether an input, such as data or a parameter, was not finite
};

/// Looks at the results of all operators of this process as long as this object lives, and finds the first result of a
/// microbatch that is NaN or infinite. The results come from callbacks of at::RecordFunction. The callbacks read the
/// results of each operator once more, so training takes several times as long. Ranks must be processes, since this
/// object cannot tell the threads of one process apart.
///
/// An operator is reported only if its microbatch goes wrong: if the loss or a gradient is not finite. So masks of
/// -infinity, and numbers that a `where` throws away, are passed over. A -infinity is reported only if no result of the
/// microbatch was NaN or +infinity. Memory that has not been written yet is not checked.
class FindNonfinite {
 public:
  FindNonfinite();
  ~FindNonfinite();
  FindNonfinite(const FindNonfinite&) = delete;
  FindNonfinite& operator=(const FindNonfinite&) = delete;

  /// It is called when a loss's backward has ended. Returns where the first result that is not finite came from, if the
  /// loss or a gradient is not finite. Then it forgets all results that were seen.
  std::optional<NonfiniteResult> end_backward(const at::Tensor& loss);

  /// It is called instead of `end_backward` if the result is not needed. It forgets the results that were seen since
  /// the last call.
  void pass_over_backward();

  struct Seen;  ///< the data that the callbacks write

 private:
  std::unique_ptr<Seen> seen_;
};

}  // namespace tessera
