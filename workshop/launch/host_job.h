#pragma once

// See docs/glossary.md: last words.

#include <absl/status/statusor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "workshop/launch/exit_report.h"
#include "workshop/launch/launcher.h"
#include "workshop/launch/rank_environment.h"

namespace tessera {

/// The data with which the agent on a host starts its ranks.
struct HostJob {
  LaunchOptions options;  ///< only these are used: command, ranks, pretended_hosts (the job's hosts), max_restarts,
                          ///< strict, plan, silence_s
  JobSettings job;        ///< address, port, restarts, run_id
  int first_rank = 0;
  int ranks = 0;                         ///< number of ranks on this host
  std::string directory;                 ///< working directory
  std::vector<std::string> environment;  ///< "NAME=value"; these are added to the variables of the host's shell
};

/// Returns the job of the host that has `ranks` ranks from `first` on. The function fails with error 64 if a variable
/// that `options.over_ssh.environment` names is not set here.
absl::StatusOr<HostJob> make_host_job(const LaunchOptions& options, const JobSettings& job, int first, int ranks);

/// Returns the variables of `environment` ("NAME=value") that are sent to every host of a job. They are the ones that
/// change a program's results, its speed, or the files that it finds. `named` has the names of more variables that are
/// sent to every host. Returns error 64 if one of these is not set.
///
/// | variables                                       | why                                                       |
/// |-------------------------------------------------|-----------------------------------------------------------|
/// | PATH, LD_LIBRARY_PATH, VIRTUAL_ENV, PYTHON*     | the program and its libraries are found as on this host   |
/// | OMP_*, GOMP_*, KMP_*, MKL_*, OPENBLAS_*         | threads, and mathematical libraries                       |
/// | DNNL_*, ONEDNN_*, ATEN_CPU_CAPABILITY           | the same                                                  |
/// | TORCH_*, PYTORCH_*, CUDA_*, NCCL_*, GLOO_*      | PyTorch and its libraries                                 |
/// | TESSERA_*, HF_*, LANG, LC_*                     | Tessera, Hugging Face, the encoding of texts              |
absl::StatusOr<std::vector<std::string>> travelling_environment(const std::vector<std::string>& environment,
                                                                const std::vector<std::string>& named);

/// These functions turn a HostJob into the body of a frame, and back. The second one returns nothing if the body is
/// broken.
std::string encode(const HostJob& job);
std::optional<HostJob> decode_job(std::string_view body);

/// These functions encode a host's facts about a rank that ended: pid, exit, memory and last words. Times are sent as
/// ages, since the clocks of two hosts differ.
std::string encode_exit(const RankRecord& record);
std::optional<RankRecord> decode_exit(int rank, std::string_view body);

/// The first line that an agent writes, without line ends. A launcher looks for it after the output of a login shell,
/// which may lack a line end.
extern const std::string_view kAgentGreeting;  ///< the beginning of this line; Tessera's version follows it
std::string_view own_version();

}  // namespace tessera
