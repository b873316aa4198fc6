#include "tessera/run.h"

#include <exception>

#include "engine/last_words.h"
#include "engine/run_scope.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {
namespace {

/// Ranks leave together, so that none looks lost to the others: the one that serves the store, or still writes a file. Where
/// the mesh has ended with an error that the program dealt with, there is nobody to wait for.
void leave_together(const Mesh& mesh) {
  MeshGroups& groups = groups_of(mesh);
  if (!groups.status().ok()) return;
  throw_if_error(value_or_throw(groups.user_group())->barrier("the end of tessera::run").wait());
}

}  // namespace

int run(const std::function<void()>& body) {
  if (RunScope::current) throw Error(ExitCode::kUsage, "tessera::run was called inside tessera::run");
  RunScope scope;
  try {
    body();
    if (scope.mesh) leave_together(*scope.mesh);
    return static_cast<int>(ExitCode::kOk);
  } catch (...) {
    absl::Status status = status_of(std::current_exception());
    if (scope.mesh) {
      groups_of(*scope.mesh).abort(status);
      status = groups_of(*scope.mesh).status();  // an earlier reason, if there was one
    }
    const std::string message = with_hint(status);
    write_error_file(message);
    log_error(message);
    return static_cast<int>(exit_code_of(status));
  }
}

}  // namespace tessera
