#pragma once

#include <chrono>
#include <functional>
#include <vector>

namespace tessera {

/// Runs each of `tasks` on a thread of its own and waits no longer than `limit`; true if all returned true. A task that
/// is not over by then is left behind, so it must own all it uses. Tasks throw nothing.
bool succeed_in_time(std::vector<std::function<bool()>> tasks, std::chrono::milliseconds limit);

/// One task, which cannot fail.
bool ends_in_time(std::function<void()> task, std::chrono::milliseconds limit);

}  // namespace tessera
