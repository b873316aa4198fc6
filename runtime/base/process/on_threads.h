#pragma once

#include <cstddef>
#include <functional>

namespace tessera {

/// Runs `task(i)` for all i < count, and returns when all are done. It uses at most `threads` threads, the calling one
/// among them, and never more than 8. (at::parallel_for has more than one thread only in code that is compiled with
/// OpenMP.) If tasks throw, the first exception is thrown again here. LibTorch's thread-local state (gradient mode,
/// guards) has its defaults on the other threads.
void on_threads(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& task);

}  // namespace tessera
