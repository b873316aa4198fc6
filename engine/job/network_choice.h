#pragma once

#include <absl/status/status.h>

#include <memory>

#include "runtime/comm/key_value_store.h"
#include "runtime/comm/rounds/algorithm.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

/// How the calls over gloo of a job go whose comm.network_fit is a file of costs: by what rank 0 reads of it.
class NetworkChoice {
 public:
  explicit NetworkChoice(const CommConfig& comm);

  /// For make_process_mesh; null where no file is named. Known when agree() has returned, which is before groups are made.
  ChooseAlgorithm choose() const;

  /// Collective over all ranks of the job. 78 where this rank's comm.network_fit is not rank 0's. What is wrong with the file (those of
  /// read_link_fit) is an error on all ranks.
  absl::Status agree(const Topology& topology, KeyValueStore& store);

 private:
  const CommConfig& comm_;
  const std::shared_ptr<ChooseAlgorithm> by_;
};

}  // namespace tessera
