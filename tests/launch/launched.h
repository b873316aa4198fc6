#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/limits/patience.h"
#include "workshop/launch/launcher.h"

// Helpers that tests of the launcher share: a launcher in a separate process, and functions that look at the processes
// that it started.

namespace tessera {

/// Runs `launch` in a separate process and reads its output. The destructor ends the process, and the ranks with it.
class Launcher {
 public:
  explicit Launcher(LaunchOptions options, std::optional<rlimit> descriptors = std::nullopt) {
    EXPECT_EQ(::pipe2(out_.data(), O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(err_.data(), O_CLOEXEC), 0);
    options.stdout_fd = out_[1];
    options.stderr_fd = err_[1];
    pid_ = ::fork();
    if (pid_ == 0) {
      if (descriptors) ::setrlimit(RLIMIT_NOFILE, &*descriptors);
      ::_exit(launch(options));
    }
    ::close(out_[1]);
    ::close(err_[1]);
  }
  ~Launcher() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(out_[0]);
    ::close(err_[0]);
  }

  pid_t pid() const { return pid_; }
  void send(int signal) { ::kill(pid_, signal); }

  /// Reads until both pipes are closed, then waits for the process. Returns the exit code in the form in which a shell
  /// reports it.
  int wait() {
    while (read_some(-1)) {
    }
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  /// Reads until `text` appeared on stdout or stderr.
  void wait_for(const std::string& text) {
    for (Deadline limit(std::chrono::seconds(20)); (out + '\0' + err).find(text) == std::string::npos;)
      ASSERT_TRUE(read_some(500) || !limit.passed()) << "no " << text << " in " << out << err;
  }

  std::string out, err;

 private:
  bool read_some(int timeout_ms) {
    std::array<pollfd, 2> ends = {{{open_[0] ? out_[0] : -1, POLLIN, 0}, {open_[1] ? err_[0] : -1, POLLIN, 0}}};
    if (!open_[0] && !open_[1]) return false;
    if (::poll(ends.data(), 2, timeout_ms) <= 0) return false;
    for (int i = 0; i < 2; ++i) {
      if (!ends[i].revents) continue;
      std::array<char, 4096> buffer;
      const ssize_t got = ::read(ends[i].fd, buffer.data(), buffer.size());
      if (got <= 0)
        open_[i] = false;
      else
        (i == 0 ? out : err).append(buffer.data(), static_cast<std::size_t>(got));
    }
    return true;
  }

  pid_t pid_;
  std::array<int, 2> out_, err_;
  std::array<bool, 2> open_ = {true, true};
};

/// Returns options to run `script` on each rank. A test that waits for a timeout sets a shorter one.
inline LaunchOptions shell(int ranks, const std::string& script) {
  LaunchOptions options;
  options.ranks = ranks;
  options.command = {"/bin/sh", "-c", script};
  options.times.grace_s = 600;
  options.times.term_s = 600;
  return options;
}

/// A folder for files by which ranks wait for each other. It is removed when the test ends.
class Folder {
 public:
  Folder() {
    std::string name = ::testing::TempDir() + "tessera-launch-XXXXXX";
    path_ = ::mkdtemp(name.data()) ? name : "";
    EXPECT_NE(path_, "");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Returns whether a process is alive, and not a zombie.
inline bool is_running(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const auto end = line.rfind(')');
  return end != std::string::npos && line[end + 2] != 'Z' && line[end + 2] != 'X';
}

inline bool becomes_true(const std::function<bool()>& condition) {
  for (Deadline limit(std::chrono::seconds(10)); !condition();
       std::this_thread::sleep_for(std::chrono::milliseconds(5)))
    if (limit.passed()) return false;
  return true;
}

/// Returns the numbers that follow `key` in `text`, such as "pid=12".
inline std::vector<pid_t> numbers_after(const std::string& text, const std::string& key) {
  std::vector<pid_t> found;
  for (auto at = text.find(key); at != std::string::npos; at = text.find(key, at + 1))
    found.push_back(static_cast<pid_t>(std::stol(text.substr(at + key.size()))));
  return found;
}

}  // namespace tessera
