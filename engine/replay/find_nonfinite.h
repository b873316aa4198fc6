#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

namespace tessera {

/// The place from which a number that is not finite came.
struct NonfiniteResult {
  std::string op;     ///< "aten::mul"
  std::string where;  ///< "forward", or the node of the graph: "MulBackward0, in backward"
  std::string unit;   ///< the unit whose parameters the operator reads, else the unit read last; empty: none so far
  bool reads_parameters = false;
  bool had_bad_input = false;  ///< an input, such as data or parameters, was not finite
};

/// Looks at the results of all operators of this process as long as it lives, and finds the first one of a microbatch
/// that is NaN or infinite. It is an at::RecordFunction callback; each operator's results are read once more, so
/// training takes several times as long. Ranks must be processes, as it cannot tell threads of one process apart.
///
/// An operator is blamed only where its microbatch goes wrong: its loss or a gradient is not finite. So masks of
/// -infinity, and numbers that a `where` throws away, are passed over. -infinity is blamed only where no NaN and no
/// +infinity followed. Memory that nobody has written yet is not looked at.
class FindNonfinite {
 public:
  FindNonfinite();
  ~FindNonfinite();
  FindNonfinite(const FindNonfinite&) = delete;
  FindNonfinite& operator=(const FindNonfinite&) = delete;

  /// It is called when a loss's backward is over. Returns where the first result that is not finite came from, if the
  /// loss or a gradient is not finite. Then it forgets what was seen.
  std::optional<NonfiniteResult> end_backward(const at::Tensor& loss);

  /// It is called in place of `end_backward` where nobody asks for a result. It forgets what was seen since the last
  /// call.
  void pass_over_backward();

  struct Seen;  ///< what the callbacks write

 private:
  std::unique_ptr<Seen> seen_;
};

}  // namespace tessera
