#include "runtime/config/strategy_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "runtime/base/bytes.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_reader.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;

ExitCode code_of_open_error(int error) {
  if (error == ENOENT || error == ENOTDIR) return ExitCode::kNoInput;
  return error == EACCES ? ExitCode::kPermission : ExitCode::kIo;
}

absl::Status os_error(ExitCode code, const std::filesystem::path& path, const char* what, int error) {
  return make_error(code, fmt::format("strategy file {}: {}: {} (errno {})", path.string(), what,
                                      std::generic_category().message(error), error));
}

absl::Status too_large(const std::string& name) {
  return make_error(ExitCode::kConfig, fmt::format("{}:1:1: /: larger than {}: this is not a strategy file", name,
                                                   format_bytes(static_cast<std::int64_t>(kMaxFileBytes))));
}

// Reads at most one byte more than is allowed: the file may be a pipe, whose size nobody knows.
absl::StatusOr<std::string> read_up_to_limit(int fd, const std::filesystem::path& path) {
  std::string text(kMaxFileBytes + 1, '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(fd, text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return os_error(ExitCode::kIo, path, "cannot be read", errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace

absl::StatusOr<Strategy> read_strategy(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    return os_error(code_of_open_error(error), path, "cannot be opened", error);
  }
  const absl::StatusOr<std::string> text = read_up_to_limit(fd, path);
  ::close(fd);
  if (!text.ok()) return text.status();
  return parse_strategy(*text, path.string());
}

absl::StatusOr<Strategy> parse_strategy(const std::string& text, const std::string& name) {
  if (text.size() > kMaxFileBytes) return too_large(name);
  Diagnostics diagnostics(name, text);
  Strategy strategy;
  if (const auto root = parse_json(text, diagnostics)) strategy = StrategyReader(diagnostics).read(*root);
  TESSERA_RETURN_IF_ERROR(diagnostics.to_status());
  return strategy;
}

std::string Strategy::to_json() const {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  for (const StrategyKey& key : strategy_keys()) {
    root[nlohmann::ordered_json::json_pointer(key.pointer)] = key.field.get(*this);
  }
  return root.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace tessera
