#pragma once

#include <functional>

namespace tessera {

/// Runs the body of a training program's `main` and returns the program's exit code:
///
///   int main() {
///     return tessera::run([] {
///       tessera::Mesh mesh = tessera::init();
///       ...
///     });
///   }
///
/// Any exception that `body` throws ends this rank. The other ranks of a mesh that `body` made with `init` get the
/// exception's text and end too; their errors name this rank. The text is logged once. It is also written to
/// $TORCHELASTIC_ERROR_FILE, where torchrun and `tessera launch` look for the first cause. If a program does not use
/// `run`, the other ranks learn from the Engine only *that* an exception ended this rank, and not the exception's text.
///
/// When `body` returns, ranks wait for each other (comm.timeout_s at most) and leave together, so that rank 0 may still
/// write a file after the last step. If a rank fails meanwhile, the ranks that wait end with the text of its error too.
///
/// Returns 0, the code of a tessera::Error, 71 for std::bad_alloc, or else 70 (tessera/exit_code.h). Calls do not nest.
int run(const std::function<void()>& body);

}  // namespace tessera
