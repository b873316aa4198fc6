#include "engine/last_words.h"

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>

#include "engine/run_scope.h"
#include "runtime/base/process_limits.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

const char* hint_for(ExitCode code) {
  switch (code) {
    case ExitCode::kUsage:
      return "--help lists the options";
    case ExitCode::kCorruptData:
      return "the file named is damaged or of another kind";
    case ExitCode::kNoInput:
      return "check the path; relative ones start at the folder the program was started in";
    case ExitCode::kUnavailable:
      return "tessera doctor shows what this machine offers";
    case ExitCode::kInternal:
      return "the model's code or Tessera failed";
    case ExitCode::kOsResource:
      return "tessera plan shows what each strategy needs";
    case ExitCode::kCannotCreate:
      return "check that the folder exists and can be written";
    case ExitCode::kIo:
      return "the system's own message says why; a full disk or a file server that went away are usual";
    case ExitCode::kPeerLost:
      return "the rank named ended first: its own message says why; if it ended with success, it did less than the "
             "others, such as a loader with fewer batches";
    case ExitCode::kPermission:
      return "check owner and mode of what is named";
    case ExitCode::kConfig:
      return "docs/strategy.md lists every key";
    case ExitCode::kOk:
      break;
  }
  return "";
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string memory_story() { return RunScope::current ? RunScope::current->memory_story : std::string(); }

/// What somebody else's code threw: 71 or 74 where a limit of the process is why, else 70.
absl::Status foreign_error(const std::string& text) {
  const std::string line = first_line(text);
  const int limit = limit_in(line);
  if (limit == 0) return make_error(ExitCode::kInternal, line);
  const std::string remedy = limit == ENOMEM ? memory_story() : "";
  return make_error(exit_code_of_errno(limit), line + (remedy.empty() ? ". hint: " + limit_hint(limit) : remedy));
}

}  // namespace

absl::Status status_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return make_error(error.exit_code(), error.message());
  } catch (const c10::OutOfMemoryError& error) {
    return make_error(ExitCode::kOsResource, first_line(error.what_without_backtrace()) + memory_story());
  } catch (const std::bad_alloc&) {
    return make_error(ExitCode::kOsResource, "out of memory. hint: " + limit_hint(ENOMEM));
  } catch (const c10::Error& error) {
    return foreign_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return foreign_error(error.what());
  } catch (...) {
    return make_error(ExitCode::kInternal, "an exception that is no std::exception");
  }
}

std::string with_hint(const absl::Status& status) {
  const std::string message = message_of(status);
  if (message.find("hint:") != std::string::npos) return message;
  const char* between = message.find('\n') == std::string::npos ? ". hint: " : "\nhint: ";
  return message + between + hint_for(exit_code_of(status));
}

void write_error_file(const std::string& message, const std::string& call_stack, bool told_by_peer) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (!path || !*path) return;
  const nlohmann::json words = {{"message",
                                 {{"message", message},
                                  {"extraInfo",
                                   {{"py_callstack", call_stack},
                                    {"timestamp", std::to_string(std::time(nullptr))},
                                    {"told_by_peer", told_by_peer}}}}}};
  std::ofstream(path, std::ios::trunc) << words.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

}  // namespace tessera
