#include "engine/job/last_words.h"

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <string_view>

#include "engine/job/run_scope.h"
#include "runtime/base/errno_hint.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string memory_story() { return RunScope::current ? RunScope::current->memory_story : std::string(); }

/// Returns the Engine's explanation of its memory, which ends with a hint from its plan; if there is no Engine, a
/// general hint.
std::string memory_story_with_hint() {
  const std::string story = memory_story();
  return story.empty() ? ". [T0182] hint: take smaller batches, or fewer ranks on this host" : story;
}

/// Returns the status for an exception that is not Tessera's: 71 or 74 where the text names a limit of the process,
/// else 70.
absl::Status foreign_error(const std::string& text) {
  const std::string line = first_line(text);
  const int limit = limit_in(line);
  if (limit == 0) return make_error(ExitCode::kInternal, line);
  const std::string remedy = limit == ENOMEM ? memory_story() : "";
  return make_error(exit_code_of_errno(limit), line + (remedy.empty() ? ". " + limit_hint(limit) : remedy));
}

}  // namespace

absl::Status status_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return make_error(error.exit_code(), error.message());
  } catch (const c10::OutOfMemoryError& error) {
    return make_error(ExitCode::kOsResource, first_line(error.what_without_backtrace()) + memory_story_with_hint());
  } catch (const std::bad_alloc&) {
    return make_error(ExitCode::kOsResource, "out of memory. " + limit_hint(ENOMEM));
  } catch (const c10::Error& error) {
    return foreign_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return foreign_error(error.what());
  } catch (...) {
    return make_error(ExitCode::kInternal, "an exception that is no std::exception");
  }
}

void write_error_file(const std::string& message, const std::string& call_stack, bool told_by_peer,
                      std::optional<ExitCode> code) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (!path || !*path) return;
  nlohmann::json more = {
      {"py_callstack", call_stack}, {"timestamp", std::to_string(std::time(nullptr))}, {"told_by_peer", told_by_peer}};
  if (code) more["code_of_tessera"] = static_cast<int>(*code);
  const nlohmann::json words = {{"message", {{"message", message}, {"extraInfo", more}}}};
  std::ofstream(path, std::ios::trunc) << words.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

void note_results_to_write(bool are_left) {
  const char* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  const char* const worker = std::getenv("TESSERA_WORKER");
  if (!path || !*path || !worker || !*worker) return;
  std::ofstream(std::string(path) + ".results", std::ios::trunc) << (are_left ? "to write\n" : "written\n");
}

void note_joined() {
  const char* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  const char* const launcher = std::getenv("TESSERA_LAUNCHER");
  if (!path || !*path || !launcher || std::string_view(launcher) != "tessera") return;
  std::ofstream(std::string(path) + ".joined", std::ios::trunc) << "joined\n";
}

}  // namespace tessera
