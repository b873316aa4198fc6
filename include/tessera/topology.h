#pragma once

#include <string>
#include <vector>

namespace tessera {

/// The place of this process among the ranks of the job, and the address at which the ranks meet. `tessera::init` reads
/// both from the launcher's variables.
struct Topology {
  int rank = 0;              ///< index of this rank in the job
  int world_size = 1;        ///< number of ranks in the job
  int local_rank = 0;        ///< index of this rank on its host
  int local_world_size = 1;  ///< number of ranks on this host; ranks are numbered host by host
  int host = 0;              ///< index of this host
  /// Number of ranks on each host; empty if all hosts hold local_world_size ranks. `put_on_hosts` sets it.
  std::vector<int> ranks_of_hosts = {};
  /// "torchrun", "slurm", "openmpi", "pmi", "mvapich2", "tessera", "torch.distributed" or "single"
  std::string launcher = "single";

  std::string master_addr = "127.0.0.1";  ///< address of the rendezvous
  int master_port = 29500;                ///< TCP port of the rendezvous
  std::string run_id;                     ///< id that keeps two jobs apart: TORCHELASTIC_RUN_ID, SLURM_JOB_ID, ...
  int restart_count = 0;                  ///< number of restarts of the job by the launcher
  bool agent_store = false;  ///< torchrun's agent, or torch.distributed, runs the store, so every rank is a client

  /// Assigns the job's ranks to hosts, where host h gets `ranks[h]` of them. Sets host, local_rank, local_world_size
  /// and ranks_of_hosts. REQUIRES: positive numbers whose sum is world_size.
  void put_on_hosts(const std::vector<int>& ranks);
  /// Returns the number of hosts.
  int num_hosts() const;
  /// Returns the index of the host that holds `rank`.
  int host_of(int rank) const;
  /// Returns whether all hosts hold the same number of ranks.
  bool has_equal_hosts() const { return ranks_of_hosts.empty(); }
  /// Returns whether `size` divides the number of ranks of every host. Then groups of `size` neighbours, counted from
  /// rank 0 on, never span two hosts.
  bool hosts_hold_whole_groups_of(int size) const;
  /// Returns a text such as "rank 0/4 (torchrun), host 0, local rank 0".
  std::string describe() const;
};

}  // namespace tessera
