#include "runtime/comm/mpi/mpi_transport.h"

#include <dlfcn.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/comm/c10d/c10d_collectives.h"
#include "runtime/comm/c10d/failure_report.h"
#include "runtime/comm/meet_in_store.h"
#include "runtime/comm/mpi/mpi_plugin.h"

namespace tessera {
namespace {

/// Returns the paths where the plug-in may lie, in the order in which they are tried.
std::vector<std::string> places_of_plugin() {
  if (const char* const named = std::getenv("TESSERA_MPI_PLUGIN")) return {named};
  std::vector<std::string> places;
  Dl_info own = {};
  if (dladdr(reinterpret_cast<const void*>(&check_mpi), &own) != 0 && own.dli_fname)
    places.push_back((std::filesystem::path(own.dli_fname).parent_path() / MpiPlugin::kFile).string());
  places.emplace_back(MpiPlugin::kFile);
  return places;
}

absl::StatusOr<const MpiPlugin*> load_plugin() {
  std::vector<std::string> reasons;
  for (const std::string& place : places_of_plugin()) {
    // Open MPI loads its own plug-ins, which look up MPI's symbols among the global symbols.
    void* const library = dlopen(place.c_str(), RTLD_NOW | RTLD_GLOBAL);
    const void* const found = library ? dlsym(library, MpiPlugin::kSymbol) : nullptr;
    if (!found) {
      const char* const reason = dlerror();
      reasons.emplace_back(reason ? reason : place);
      continue;
    }
    const auto* const plugin = static_cast<const MpiPlugin*>(found);
    if (plugin->version == MpiPlugin::kVersion && std::string(plugin->torch) == TORCH_VERSION) return plugin;
    return make_error(ExitCode::kConfig,
                      "the plug-in " + place +
                          " for comm.transport \"mpi\" is of another version of Tessera or LibTorch. "
                          "[T1026] hint: build it from the sources of this Tessera, with LibTorch " +
                          TORCH_VERSION);
  }
  return make_error(
      ExitCode::kUnavailable,
      "comm.transport is \"mpi\", but its plug-in cannot be loaded: " + joined(reasons, "; ") +
          ". [T1027] hint: install an MPI with its headers (Debian: libopenmpi-dev) and build Tessera, which then "
          "makes libtessera_mpi.so; TESSERA_MPI_PLUGIN names that file where it lies elsewhere");
}

const absl::StatusOr<const MpiPlugin*>& mpi_plugin() {
  static const absl::StatusOr<const MpiPlugin*> plugin = load_plugin();
  return plugin;
}

}  // namespace

absl::Status check_mpi(const Topology& topology) {
  // MPI must give the ranks the same numbers as the job. It does so if one of these launchers gave the job its numbers.
  constexpr std::array<std::string_view, 5> kLaunchers = {"openmpi", "slurm", "pmi", "mvapich2", "mpi4py"};
  if (std::ranges::find(kLaunchers, topology.launcher) == kLaunchers.end())
    return make_error(ExitCode::kConfig,
                      "comm.transport is \"mpi\", but the ranks were started by " + topology.launcher +
                          ", of which MPI knows nothing. [T1028] hint: start them with mpirun -n N PROGRAM, or "
                          "with srun --mpi=pmix");
  return mpi_plugin().status();
}

absl::StatusOr<std::shared_ptr<Collectives>> mpi_collectives(const Group& group, std::shared_ptr<C10dStore> store,
                                                             ChooseAlgorithm choose) {
  TESSERA_ASSIGN_OR_RETURN(const MpiPlugin* const mpi, mpi_plugin());
  FailureReport report(group, store);
  report.publish_arrival();
  const std::string cannot = group.self() + ": group " + group.key() + " cannot be joined over MPI: ";
  const auto cannot_join = [&](const std::string& why) { return report.explain_arrival(cannot + why); };
  // MPI would wait without a limit for a rank that never joins.
  const absl::Status met = meet_in_store(group, "met/mpi", *store);
  if (!met.ok()) return absl::IsDeadlineExceeded(met) ? cannot_join(kNotAllHaveCome) : met;
  try {
    return c10d_collectives(group, TransportKind::kMpi, mpi->join(group), std::move(store), std::move(choose));
  } catch (const std::invalid_argument& error) {  // a restart would not help
    return make_error(ExitCode::kConfig,
                      cannot + error.what() +
                          ". [T1048] hint: start all ranks by one mpirun, or by srun --mpi=pmix, with an "
                          "MPI that has MPI_THREAD_MULTIPLE");
  } catch (const std::exception& error) {
    return cannot_join(text_of_c10_exception(error));
  }
}

}  // namespace tessera
