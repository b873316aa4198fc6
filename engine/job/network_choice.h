#pragma once

#include <absl/status/status.h>

#include <memory>

#include "runtime/comm/key_value_store.h"
#include "runtime/comm/rounds/algorithm.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

/// Chooses the algorithms of a job's collectives over gloo and mpi, if comm.network_fit names a file of costs. Rank 0
/// reads the file, so that all ranks make the same choice. tessera::init makes a NetworkChoice, calls `choose`, then
/// `agree`.
class NetworkChoice {
 public:
  explicit NetworkChoice(const CommConfig& comm);

  /// Returns the function that make_process_mesh takes; null if no file is named. The function returns "direct" until
  /// agree() has returned. No collective of several ranks calls it before that.
  ChooseAlgorithm choose() const;

  /// Lets all ranks of the job take the costs that rank 0 reads. It is collective over `store`. Errors: 78 if this
  /// rank's comm.network_fit differs from that of rank 0; the errors of read_link_fit, which all ranks get.
  absl::Status agree(const Topology& topology, KeyValueStore& store);

 private:
  const CommConfig& comm_;
  const std::shared_ptr<ChooseAlgorithm> by_;
};

}  // namespace tessera
