#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "offload/io/io_backend.h"

namespace tessera {

/// Threads that call pread(2) and pwrite(2), for systems that forbid io_uring. Each moves one transfer at a time.
/// Errors (71): a thread cannot be started.
absl::StatusOr<std::unique_ptr<IoBackend>> make_thread_backend(int threads);

}  // namespace tessera
