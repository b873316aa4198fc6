#include "tessera/run.h"

#include <exception>

#include "engine/last_words.h"
#include "engine/run_scope.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {

int run(const std::function<void()>& body) {
  if (RunScope::current) throw Error(ExitCode::kUsage, "tessera::run was called inside tessera::run");
  RunScope scope;
  try {
    body();
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
