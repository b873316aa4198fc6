#pragma once

#include <functional>

namespace tessera {

/// The body of a training program's `main`:
///
///   int main() {
///     return tessera::run([] {
///       tessera::Mesh mesh = tessera::init();
///       ...
///     });
///   }
///
/// Whatever `body` throws ends this rank in one way: the ranks of a mesh that it made with `init` are told the
/// exception's text and end too, naming this rank; the text is logged once; it is written to
/// $TORCHELASTIC_ERROR_FILE, where torchrun and `tessera launch` look for the first cause. Without `run`, other ranks
/// learn from the Engine only *that* an exception ended this one.
///
/// Where `body` returns, ranks wait for each other (comm.timeout_s at most) and leave together, so that rank 0 may still
/// write a file after the last step. If a rank fails meanwhile, those that wait end with its text too.
///
/// Returns the exit code: 0, that of a tessera::Error, 71 for std::bad_alloc, else 70 (tessera/exit_code.h). Not
/// nested.
int run(const std::function<void()>& body);

}  // namespace tessera
