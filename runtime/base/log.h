#pragma once

#include <string>

namespace tessera {

/// Messages to stderr, one call one write, so that lines of several ranks do not interleave:
///
///     12:00:01.250 info    [rank 3/8] 12 units, 112.00 MiB of parameters
///
/// A facade, so that no header and no file that includes LibTorch sees spdlog or fmt (LibTorch bundles
/// another fmt). All functions may be called from any thread. A message longer than 32 KiB is cut there.

enum class LogLevel { kInfo, kWarning, kError, kOff };

void log_info(const std::string& message);
void log_warning(const std::string& message);
void log_error(const std::string& message);

/// Least important level that is printed. It starts as the environment variable TESSERA_LOG_LEVEL says
/// ("info", "warning", "error" or "off"; anything else is warned about), else as kInfo.
void set_log_level(LogLevel level);
LogLevel log_level();
/// `--quiet`: warnings and errors only. Never makes the log more talkative than it is.
void set_log_quiet();

/// Who the calling *thread* is, for the prefix. Ranks may be threads of one process, so this is kept per
/// thread; a thread started on behalf of a rank takes it over: `set_log_rank(rank)` with what its parent's
/// `log_rank()` gave.
struct LogRank {
  int rank = 0;
  int world_size = 1;  ///< 1: no prefix
};
void set_log_rank(int rank, int world_size);
void set_log_rank(const LogRank& rank);
LogRank log_rank();

}  // namespace tessera
