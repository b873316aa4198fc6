#pragma once

#include <absl/status/statusor.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/resolve_topology.h"

namespace tessera {

constexpr int kMostRanks = 1 << 24;  ///< a larger number is a mistake; the product of two numbers fits into 64 bits

/// The names of the variables in which one launcher gives a process its rank, the world size and the local numbers. An
/// empty name means that this launcher has no such variable.
struct Dialect {
  const char* launcher;
  const char* title;  ///< name in messages
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  int outerness;           ///< a launcher may start agents of launchers with a lower number, one on each host
  const char* order_hint;  ///< hint about how to make the launcher number ranks host by host
};

extern const Dialect kTorchrun;  ///< `tessera launch` uses its variables too
extern const Dialect kSlurm;
/// Values that the program itself gives, and not a launcher. They come from its process group of torch.distributed.
/// Python passes them on under these names.
extern const Dialect kProcessGroup;

/// Returns an error (78) with a hint that names the source of these variables, unless `message` already has a hint. The
/// message is cut if it is very long.
absl::Status launcher_error(std::string message);

/// The facts that one launcher gave about this process.
struct Candidate {
  const Dialect* dialect = nullptr;
  int rank = 0;
  int world_size = 1;
  const char* world_origin = "";         ///< variable from which world_size was read, since Slurm has two
  int local_rank = -1;                   ///< -1: unknown
  int local_world_size = -1;             ///< -1: unknown
  std::string local_origin;              ///< variable from which local_world_size was read
  std::vector<int> ranks_of_hosts = {};  ///< ranks on each host; empty if all hosts have equally many, or if unknown

  bool knows_locals() const { return local_rank >= 0 && local_world_size > 0; }
  /// Returns the topology of the rank, if the ranks of each host have consecutive numbers. REQUIRES: knows_locals().
  Topology topology() const;
};

/// Reads variables from one environment, and remembers nothing. Empty values count as unset, as in `RANK= ./train`.
class LauncherVariables {
 public:
  explicit LauncherVariables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const;
  bool has(const std::string& name) const { return text(name).has_value(); }
  /// Returns the variable as an integer in [low, high]. Error 78 if it is not such an integer.
  absl::StatusOr<int> number(const Dialect& dialect, const std::string& name, int low, int high) const;
  /// Returns the variable as a list of each host's ranks, as in "2,3" or "2(x2),3". The list is empty if the variable
  /// is not set, or if it is a single number. Returns error 78 if the text is not such a list.
  absl::StatusOr<std::vector<int>> ranks_of_hosts(const std::string& name) const;

 private:
  const Environment& environment_;
};

/// Returns the error for an incomplete set of variables. It names the variables that are set and the variables that are
/// missing.
absl::Status partial_error(const LauncherVariables& variables, const Dialect& dialect,
                           const std::vector<const char*>& wanted);

/// Returns the facts from the launcher that started this rank, or nothing if no launcher's variables are set. All
/// sources are read and compared:
///
/// 1. Sources that agree count as one. The first source that gives the number of ranks of this rank's host is taken, in
///    the order torchrun, Slurm, Open MPI, PMI, MVAPICH2, MPI of mpi4py, torch.distributed.
/// 2. Some launchers only start one agent on each host (Slurm for torchrun, torchrun for `mp.spawn`), or one process in
///    all. The launcher inside them is taken instead.
/// 3. All other disagreements are an error.
///
/// Errors (78): sets are incomplete, texts are no numbers, a rank is not below its world size, or two sources disagree.
absl::StatusOr<std::optional<Candidate>> find_launcher(const LauncherVariables& variables);

}  // namespace tessera
