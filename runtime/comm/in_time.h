#pragma once

#include <chrono>
#include <functional>

namespace tessera {

/// Runs `task` on a thread of its own and waits for it no longer than `limit`; true if it came to its end. A task that
/// did not is left behind, so it must own all it uses.
bool ends_in_time(std::function<void()> task, std::chrono::milliseconds limit);

}  // namespace tessera
