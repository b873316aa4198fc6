#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "workshop/launch/launcher.h"

namespace tessera::app {

/// The command line of `tessera launch`. main.cc makes one, adds it, has the line parsed and runs it.
class LaunchLine {
 public:
  /// Adds the command, whose options write into this object.
  void add_to(CLI::App& app);
  /// Starts the ranks, and returns launch's code; 64, 66, 77 or 78 after a line that says what is wrong with the words
  /// or with the host file.
  /// REQUIRES: the line was parsed.
  int run();

  LaunchOptions options;  ///< `command`, which stands behind the "--", may be given before parsing

 private:
  void add_ranks();
  void add_hosts();
  /// Takes the words that no option took, such as a program without "--". Returns what is wrong with them.
  std::string take_words();
  /// Reads --hosts or --hostfile, else --pretend-hosts. Errors: those of host_list.h; 64 for options that need several
  /// hosts, and for pretended hosts that are no numbers, or among which the ranks cannot be divided.
  absl::Status take_hosts();
  /// Reads --workers. Error: 64 for a range that makes no sense, and for options that are for ranks of one job.
  absl::Status take_workers();

  CLI::App* command_ = nullptr;
  std::string hosts_, hostfile_, ssh_, pretended_ = "1", workers_;
};

}  // namespace tessera::app
