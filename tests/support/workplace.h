#pragma once

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/support/program.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {

using Words = std::vector<std::string>;
Words operator+(Words a, const Words& b);

/// A folder with a tiny model and a text, and the command lines that train the model on the text. The folder is removed
/// after the test.
class Workplace : public ::testing::Test {
 protected:
  Workplace();

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  /// Writes a strategy file named `name`. The strategy has two microbatches per step, bf16 parameters, and the keys of
  /// `more`, such as R"(, "prefetch": 2)". Returns the path of the file.
  std::string strategy(const std::string& name, const std::string& more = "") const;
  /// Returns a command of `tessera train` that uses the model and the text of this folder, runs 3 steps, and writes
  /// metrics to path("<metrics>").
  Words train(const std::string& strategy, const std::string& metrics, const Words& more = {}) const;
  static Words launch(int ranks, const Words& more = {});
  /// Runs a command. The test fails unless the command succeeds within the limit for `at_rest_s` on a machine at rest.
  Ended run(const Words& command, double at_rest_s = 60) const;
  /// Waits until the file holds `text`, which `job` is expected to write.
  void wait_for(const Program& job, const std::string& file, const std::string& text) const;
  /// Returns the objects of the metrics file that describe steps, without the header and the evaluations.
  std::vector<nlohmann::json> steps(const std::string& metrics) const;
  /// Returns "step, loss, norm" of each step. No bit is lost.
  std::vector<std::string> losses(const std::string& metrics) const;

  TestFolder folder_;
};

/// Returns the steps that a run of workers has printed, each as many times as it was printed: [step, such as "3/12"].
std::multiset<std::string> steps_told_of(const std::string& out);
/// Waits until `launcher` has started the servers of workers that come and go. Returns their addresses, as they are
/// given to --join.
std::string address_to_join(const Program& launcher);

/// Returns the number of a free port as text (tests/support/free_port.h).
std::string free_port();

/// Returns torchrun of the build's Python environment. The file may be missing.
std::string torchrun();

/// Returns the words that start a host with one rank under torchrun; the command of a rank follows them. One or two
/// such hosts of one `port` are a job. torchrun starts all ranks again when a host joins or leaves.
Words elastic_host(const std::string& port);

/// A host of torchrun. The destructor kills torchrun and its ranks at once. The ranks have their own process groups.
struct KilledHost {
  const Program& agent;
  ~KilledHost();
};

}  // namespace tessera::testing
