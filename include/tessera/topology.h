#pragma once

#include <string>

namespace tessera {

/// The place of this process among the ranks of the job, and the address at which the ranks meet. `tessera::init` reads
/// it from the launcher's variables.
struct Topology {
  int rank = 0;              ///< index of this rank in the job
  int world_size = 1;        ///< number of ranks in the job
  int local_rank = 0;        ///< index of this rank on its host
  int local_world_size = 1;  ///< ranks on this host; ranks are numbered host by host
  int host = 0;              ///< index of this host
  /// "torchrun", "slurm", "openmpi", "pmi", "mvapich2", "tessera", "torch.distributed" or "single"
  std::string launcher = "single";

  std::string master_addr = "127.0.0.1";  ///< address of the rendezvous
  int master_port = 29500;                ///< TCP port of the rendezvous
  std::string run_id;                     ///< TORCHELASTIC_RUN_ID, SLURM_JOB_ID, ...: keeps two jobs apart
  int restart_count = 0;                  ///< number of restarts of the job by the launcher
  bool agent_store = false;  ///< torchrun's agent, or torch.distributed, serves the store: every rank is a client

  /// Returns the number of hosts; every host has the same number of ranks.
  int num_hosts() const { return world_size / local_world_size; }
  /// Returns a text such as "rank 0/4 (torchrun), host 0, local rank 0".
  std::string describe() const;
};

}  // namespace tessera
