#pragma once

// See docs/glossary.md: unit.

#include <string>

namespace tessera {

/// Writes messages to stderr, with one write for each call, so that lines of several ranks do not interleave:
///
///     12:00:01.250 info    [rank 3/8] 12 units, 112.00 MiB of parameters
///
/// These functions hide spdlog and fmt from all headers and from all files that include LibTorch, which bundles another
/// fmt. Any thread may call them. A message longer than 32 KiB is cut at 32 KiB.

/// Levels of importance; kOff prints nothing.
enum class LogLevel { kInfo, kWarning, kError, kOff };

/// These functions print one message of their level, if the current level allows it.
void log_info(const std::string& message);
void log_warning(const std::string& message);
void log_error(const std::string& message);

/// Sets the least important level that is printed. The level at the start is that of the environment variable
/// TESSERA_LOG_LEVEL ("info", "warning", "error" or "off"; any other value gets a warning). If the variable is not set,
/// the level is kInfo.
void set_log_level(LogLevel level);
LogLevel log_level();
/// Prints warnings and errors only (`--quiet`). It never makes the log print more than it does now.
void set_log_quiet();

/// The rank of the calling *thread*, for the prefix of its messages. Ranks may be threads of one process, so each
/// thread has its own rank. A thread that works for a rank takes over the rank of its parent thread: it calls
/// `set_log_rank(rank)` with the value that `log_rank()` returned in the parent.
struct LogRank {
  int rank = 0;
  int world_size = 1;  ///< 1: messages have no prefix
};
/// Sets or returns the calling thread's rank.
void set_log_rank(int rank, int world_size);
void set_log_rank(const LogRank& rank);
LogRank log_rank();

}  // namespace tessera
