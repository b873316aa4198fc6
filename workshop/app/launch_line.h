#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "workshop/launch/launcher.h"

namespace tessera::app {

/// The command line of `tessera launch`. main.cc makes a LaunchLine, adds its command to the program's parser, parses
/// the command line and runs it.
class LaunchLine {
 public:
  /// Adds the command, whose options write into this object.
  void add_to(CLI::App& app);
  /// Starts the ranks, and returns launch's exit code. Returns 64, 66, 77 or 78 after a line that describes the error
  /// in the words or in the host file. REQUIRES: the line was parsed.
  int run();

  LaunchOptions options;  ///< `command`, the words after the "--", may be given before parsing

 private:
  void add_ranks();
  void add_hosts();
  /// Takes the words that no option took, such as a program without "--". Returns a text that describes an error in
  /// them.
  std::string take_words();
  /// Reads --hosts or --hostfile, or else --pretend-hosts. Errors: those of host_list.h; 64 if options need several
  /// hosts, if pretended hosts are no numbers, or if the ranks cannot be divided among them.
  absl::Status take_hosts();
  /// Reads --workers. Error: 64 if the range makes no sense, or if a given option does not fit workers.
  absl::Status take_workers();

  CLI::App* command_ = nullptr;
  std::string hosts_, hostfile_, ssh_, pretended_ = "1", workers_;
};

}  // namespace tessera::app
