#pragma once

#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "tessera/own_rules.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "tests/support/small_models.h"

namespace tessera::testing {

/// The way in which the ranks of a configuration reach each other.
enum class Joined {
  kMemory,    ///< "memory": they are on one host, and share its memory
  kHosts,     ///< "hosts": two hosts, with memory inside each and Gloo between them
  kGloo,      ///< "gloo": Gloo joins all of them
  kCudaHost,  ///< "cuda_host": they share an emulated GPU
  kNccl,      ///< "nccl": each rank has an emulated GPU, and a LateBackend joins them
};

/// One of the configurations of configurations.json. Each says which model is trained, on which ranks, and under which
/// strategy.
struct Configuration {
  std::string name;  ///< the name begins with the number of its row, from 01
  int ranks = 1;
  Joined joined = Joined::kMemory;
  TinyOptions model;     ///< the model that is trained
  std::string strategy;  ///< strategy as JSON, in which $FOLDER stands for a folder

  bool is_on_gpu() const { return joined == Joined::kCudaHost || joined == Joined::kNccl; }
  /// Returns the topology of rank 0.
  Topology topology() const;
  /// Returns the strategy with `folder` in place of $FOLDER, for ranks that are threads of this process. An emulated
  /// GPU is chosen by EmulatedGpus, and not by comm.transport.
  Strategy trained(const std::filesystem::path& folder) const;
  /// Returns the strategy with the transport of its GPUs. A plan can be made from it without ranks.
  Strategy planned() const;

  friend std::ostream& operator<<(std::ostream& out, const Configuration& configuration);
};

/// Returns all configurations, in the order of the file.
const std::vector<Configuration>& configurations();
std::vector<std::string> names_of_configurations();

/// Returns the program's own rules that a strategy requires: OwnAdamW, OwnMuon, and a CommHook that sends bf16.
OwnRules own_rules_for(const Strategy& strategy);

/// Returns the name in a form that GoogleTest allows, for INSTANTIATE_TEST_SUITE_P.
std::string name_of_case(const Configuration& configuration);

}  // namespace tessera::testing
