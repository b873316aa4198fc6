#include "engine/run_scope.h"

#include "engine/last_words.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {

void RunScope::leave_together() const {
  if (mesh && groups_of(*mesh).status().ok()) {
    const auto user = value_or_throw(groups_of(*mesh).user_group());
    groups_of(*mesh).leave();
    throw_if_error(user->barrier("the end of the program").wait());
  }
  throw_if_error(late_failure);
}

ExitCode RunScope::end_with(absl::Status reason, const std::string& call_stack) const {
  bool told_by_peer = false;
  if (mesh) {
    told_by_peer = groups_of(*mesh).told_by_peer();
    groups_of(*mesh).abort(reason);
    reason = groups_of(*mesh).status();  // an earlier reason, if there was one
  }
  const std::string message = with_hint(reason);
  write_error_file(message, call_stack, told_by_peer);
  log_error(message);
  return exit_code_of(reason);
}

}  // namespace tessera
