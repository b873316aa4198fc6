#pragma once

#include <absl/status/statusor.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/resolve_topology.h"

namespace tessera {

constexpr int kMostRanks = 1 << 24;  ///< a larger number is a mistake, and products of two stay within 64 bits

/// The variables in which one launcher tells a process who it is. An empty name means that this launcher has no such
/// variable.
struct Dialect {
  const char* launcher;
  const char* title;  ///< name in messages
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  int outerness;           ///< a launcher may start agents of launchers with a lower number, one on each host
  const char* order_hint;  ///< hint how to make the launcher number ranks host by host
};

extern const Dialect kTorchrun;  ///< `tessera launch` uses its variables too
extern const Dialect kSlurm;
/// Values that the program itself gives, and not a launcher: its process group of torch.distributed. Python passes them
/// on under these names.
extern const Dialect kProcessGroup;

/// Returns an error (78), with a hint that says where these variables come from, unless `message` already has a hint.
/// The message is cut where a variable is absurdly long.
absl::Status launcher_error(std::string message);

/// The facts that one launcher gave about this process.
struct Candidate {
  const Dialect* dialect = nullptr;
  int rank = 0;
  int world_size = 1;
  const char* world_origin = "";         ///< variable that world_size was read from: Slurm has two
  int local_rank = -1;                   ///< -1: unknown
  int local_world_size = -1;             ///< -1: unknown
  std::string local_origin;              ///< variable that local_world_size was read from
  std::vector<int> ranks_of_hosts = {};  ///< ranks on each host; empty where hosts are equal, or unknown

  bool knows_locals() const { return local_rank >= 0 && local_world_size > 0; }
  /// Returns the topology of the rank, if hosts hold their ranks one after the other. REQUIRES: knows_locals().
  Topology topology() const;
};

/// Reads one environment, remembering nothing. Empty values count as unset, as in `RANK= ./train`.
class LauncherVariables {
 public:
  explicit LauncherVariables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const;
  bool has(const std::string& name) const { return text(name).has_value(); }
  /// Returns the variable as an integer of [low, high]; error 78 otherwise.
  absl::StatusOr<int> number(const Dialect& dialect, const std::string& name, int low, int high) const;
  /// Returns the variable as a list of each host's ranks, as in "2,3" or "2(x2),3". The list is empty if the variable
  /// is not set, or is a number alone. Returns error 78 otherwise.
  absl::StatusOr<std::vector<int>> ranks_of_hosts(const std::string& name) const;

 private:
  const Environment& environment_;
};

/// Returns the error for an incomplete set of variables. It names those that are set and those that are missing.
absl::Status partial_error(const LauncherVariables& variables, const Dialect& dialect,
                           const std::vector<const char*>& wanted);

/// Returns what the launcher said that started this rank, or nothing if no launcher's variables are set. All sources
/// are read and compared:
///
/// 1. Sources that agree count as one. The first source that knows the ranks of a host is taken, in the order torchrun,
///    Slurm, Open MPI, PMI, MVAPICH2, MPI of mpi4py, torch.distributed.
/// 2. A launcher that only started one agent a host (Slurm for torchrun, torchrun for `mp.spawn`), or one process in
///    all, gives way to the one inside it.
/// 3. All other disagreements are an error.
///
/// Errors (78): incomplete sets, texts that are no numbers, a rank beyond its world, two sources that disagree.
absl::StatusOr<std::optional<Candidate>> find_launcher(const LauncherVariables& variables);

}  // namespace tessera
