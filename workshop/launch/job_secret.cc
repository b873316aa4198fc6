#include "workshop/launch/job_secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/launch/line_forwarder.h"
#include "workshop/launch/rank_process.h"

namespace tessera {
namespace {

constexpr std::size_t kLeastSecret = 16, kMostSecret = 256;  // bytes, as a parameter server takes them

absl::StatusOr<std::string> new_file(const std::string& file) {
  TESSERA_ASSIGN_OR_RETURN(const std::string secret, random_secret());
  const OwnedFd made(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const int error = made.is_open() ? write_all(made.get(), secret + "\n") : errno;
  if (error == 0) return secret;
  return make_error(
      ExitCode::kCannotCreate,
      fmt::format("launch: the secret cannot be written to {}: {}. [T1034] hint: name a file in a folder in "
                  "which you may write, or make it by hand: openssl rand -hex 16",
                  quoted_text(file), errno_text(error)));
}

absl::StatusOr<std::string> secret_in(const std::string& file, int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
    return make_error(
        ExitCode::kCorruptData,
        fmt::format("launch: the secret's file {} is no regular file. [T1035] hint: name a file with one line, "
                    "of 16 to 256 bytes",
                    quoted_text(file)));
  if ((info.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    return make_error(
        ExitCode::kPermission,
        fmt::format("launch: other users may read or write the secret's file {}. [T1036] hint: chmod 600 it, and "
                    "take a new secret if somebody may have read it",
                    quoted_text(file)));
  std::array<char, kMostSecret + 2> bytes{};  // with a line end, and a byte that is too many
  const ssize_t got = ::read(fd, bytes.data(), bytes.size());
  std::string_view secret(bytes.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  if (secret.ends_with('\n')) secret.remove_suffix(1);
  if (secret.size() < kLeastSecret || secret.size() > kMostSecret)
    return make_error(ExitCode::kCorruptData,
                      fmt::format("launch: the secret's file {} cannot be read, or holds no secret. "
                                  "[T1037] hint: name a file with one line, of 16 to 256 bytes",
                                  quoted_text(file)));
  return absl::StatusOr<std::string>(absl::in_place, secret);
}

}  // namespace

absl::StatusOr<std::string> random_secret() {
  std::array<unsigned char, 16> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
    return make_error(ExitCode::kOsResource, "launch: no random bytes for the servers' secret: " + reason_of(errno));
  std::string secret;
  for (const unsigned byte : random) secret += fmt::format("{:02x}", byte);
  return secret;
}

absl::StatusOr<std::string> job_secret(const std::string& file, bool makes_file) {
  if (file.empty()) {
    const char* const given = ::getenv("TESSERA_SERVERS_SECRET");
    return given != nullptr && *given != '\0' ? absl::StatusOr<std::string>(std::string(given)) : random_secret();
  }
  const OwnedFd opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const int error = errno;
  if (opened.is_open()) return secret_in(file, opened.get());
  if (error == ENOENT && makes_file) return new_file(file);
  return make_error(
      error == EACCES ? ExitCode::kPermission : ExitCode::kNoInput,
      fmt::format("launch: the secret's file {} cannot be opened: {}. [T1038] hint: copy the file that the job's "
                  "first launcher has, and let nobody else read it",
                  quoted_text(file), errno_text(error)));
}

}  // namespace tessera
