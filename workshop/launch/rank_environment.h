#pragma once

// See docs/glossary.md: last words.

#include <string>
#include <vector>

namespace tessera {

struct LaunchOptions;

/// Settings that all ranks of one job share.
struct JobSettings {
  std::string address = "127.0.0.1";  ///< address where ranks meet: an address of the first host
  int port = 0;
  int restarts = 0;  ///< number of restarts of this job until now
  std::string run_id;
  int omp_threads = 1;          ///< OMP_NUM_THREADS, if the caller's environment does not set it
  std::string error_directory;  ///< rank r may write its last words to `error_file(r)`

  std::string error_file(int rank) const { return error_directory + "/rank_" + std::to_string(rank) + ".json"; }
  /// This file exists after a worker that comes and goes was told to write the results (engine/job/last_words.h).
  std::string results_file(int worker) const { return error_file(worker) + ".results"; }
  /// This file exists after a rank has begun to train with parameter servers (engine/job/last_words.h).
  std::string joined_file(int rank) const { return error_file(rank) + ".joined"; }
};

/// Returns the environment of `rank` as "NAME=value" strings: `inherited`, torchrun's variables,
/// TESSERA_LAUNCHER=tessera, and TESSERA_HOSTS if hosts have unequal numbers of ranks. A worker that comes and goes is
/// rank 0 of 1. Its number, which is `rank`, is in TESSERA_WORKER. Other ranks have no such variable. Variables of
/// other launchers (SLURM_*, OMPI_*, ...) stay: resolve_topology (runtime/comm/resolve_topology.h) ignores them, since
/// they belong to the program that started the launcher.
std::vector<std::string> rank_environment(const LaunchOptions& options, const JobSettings& job, int rank,
                                          const std::vector<std::string>& inherited);

/// Returns `environment` without the variables by which a launcher tells a process its rank, of any launcher. A process
/// with the result is a job of one rank.
std::vector<std::string> without_rank(std::vector<std::string> environment);

/// Returns the environment of this process, as "NAME=value" strings.
std::vector<std::string> current_environment();

}  // namespace tessera
