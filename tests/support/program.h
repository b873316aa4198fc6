#pragma once

#include <sys/types.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/limits/patience.h"

namespace tessera::testing {

/// The exit status of a program, and everything that it wrote.
struct Ended {
  int code = -1;    ///< the exit code, 128 + n for signal n, or -1 if the program was killed at the limit
  std::string out;  ///< stdout
  std::string err;
  double seconds = 0;
};

/// Runs a program in its own process group. Its output is written to files. The destructor ends this group by its
/// number, and waits for the program.
class Program {
 public:
  Program(const std::vector<std::string>& command, const std::string& folder,
          const std::map<std::string, std::string>& environment = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Waits for the program. Kills it if the limit for `at_rest_s` on a machine at rest passes (patience.h).
  Ended wait(double at_rest_s);
  pid_t pid() const { return pid_; }
  std::string out() const;
  std::string err() const;
  /// Returns the living process below this process that `tessera launch` started as `rank`, or 0 if there is none.
  pid_t rank_pid(int rank) const;
  /// Waits until the process of `rank` runs. Returns false if the limit for `at_rest_s` on a machine at rest passes
  /// before that.
  bool wait_for_rank(int rank, double at_rest_s = 60) const;
  /// Returns the living processes below this process, at any depth, without this process itself.
  std::vector<pid_t> descendants() const;

 private:
  std::string folder_;
  pid_t pid_ = -1;
  bool reaped_ = false;
};

Ended run_program(const std::vector<std::string>& command, const std::string& folder, double at_rest_s = 60,
                  const std::map<std::string, std::string>& environment = {});

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& text);
/// Returns the objects of a file of JSON lines.
std::vector<nlohmann::json> read_lines(const std::string& path);
/// Returns the names in /dev/shm.
std::vector<std::string> shared_memory_names();
/// Returns names in /dev/shm that were not there `before` and that do not disappear. Other programs have names there
/// for a short time.
std::vector<std::string> shared_memory_left(const std::vector<std::string>& before);
bool is_alive(pid_t pid);

}  // namespace tessera::testing
