#pragma once

#include <cstddef>
#include <functional>

namespace tessera {

/// `task(i)` for i < count, each on one of `threads` threads at most, this one among them. (at::parallel_for has more
/// than one only in code that is compiled with OpenMP.) Rethrows what a task threw first. What LibTorch keeps by thread
/// (gradient mode, guards) begins anew on the others.
void on_threads(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& task);

}  // namespace tessera
