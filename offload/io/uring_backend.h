#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "offload/io/io_backend.h"

namespace tessera {

/// Makes a backend over the kernel's io_uring. `queue_entries`: transfers that fit into the submission queue at once, 1
/// to 4096. `one_thread`: the first thread that queues a transfer is the only one that uses it. Error (69) if io_uring
/// cannot be used, with the errno of io_uring_setup(2) and how to allow it.
absl::StatusOr<std::unique_ptr<IoBackend>> make_uring_backend(int queue_entries, bool one_thread);

}  // namespace tessera
