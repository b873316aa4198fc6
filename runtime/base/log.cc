#include "runtime/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdlib>
#include <memory>

#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestMessage = 32 * 1024;

thread_local LogRank this_thread_rank;

// stderr belongs to the process, and so does this object. It is the only object in this file that ranks share.
struct Sink {
  Sink();
  spdlog::logger logger;
  std::atomic<LogLevel> level{LogLevel::kInfo};
};

Sink& sink() {
  static Sink* const sink = new Sink;  // never destroyed, since destructors of other statics may log
  return *sink;
}

void write(LogLevel level, spdlog::level::level_enum tag, const std::string& message) {
  Sink& to = sink();
  if (level < to.level.load(std::memory_order_relaxed)) return;
  const LogRank rank = this_thread_rank;
  const std::string text = clipped(message, kLongestMessage);
  if (rank.world_size <= 1) return to.logger.log(tag, text);
  to.logger.log(tag, "[rank {}/{}] {}", rank.rank, rank.world_size, text);
}

bool read_level(const std::string& name, LogLevel& level) {
  if (name == "info")
    level = LogLevel::kInfo;
  else if (name == "warning")
    level = LogLevel::kWarning;
  else if (name == "error")
    level = LogLevel::kError;
  else if (name == "off")
    level = LogLevel::kOff;
  else
    return false;
  return true;
}

Sink::Sink() : logger("tessera", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
  logger.set_pattern("%H:%M:%S.%e %-7l %v");
  const char* variable = std::getenv("TESSERA_LOG_LEVEL");
  LogLevel wanted = LogLevel::kInfo;
  if (variable == nullptr || *variable == '\0') return;
  if (read_level(variable, wanted)) {
    level = wanted;
  } else {
    logger.warn("TESSERA_LOG_LEVEL: {} is not a level; levels are info, warning, error, off{}", quoted_text(variable),
                did_you_mean(variable, {"info", "warning", "error", "off"}));
  }
}

}  // namespace

void log_info(const std::string& message) { write(LogLevel::kInfo, spdlog::level::info, message); }
void log_warning(const std::string& message) { write(LogLevel::kWarning, spdlog::level::warn, message); }
void log_error(const std::string& message) { write(LogLevel::kError, spdlog::level::err, message); }

void set_log_level(LogLevel level) { sink().level = level; }
LogLevel log_level() { return sink().level; }
void set_log_quiet() {
  if (log_level() < LogLevel::kWarning) set_log_level(LogLevel::kWarning);
}

void set_log_rank(int rank, int world_size) { this_thread_rank = {rank, world_size}; }
void set_log_rank(const LogRank& rank) { this_thread_rank = rank; }
LogRank log_rank() { return this_thread_rank; }

}  // namespace tessera
