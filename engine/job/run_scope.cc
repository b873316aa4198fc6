#include "engine/job/run_scope.h"

#include "engine/job/last_words.h"
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

absl::Status RunScope::tell(const absl::Status& reason, const std::string& call_stack, bool is_own_code) const {
  absl::Status told = reason;
  bool told_by_peer = false;
  if (mesh) {
    told_by_peer = groups_of(*mesh).told_by_peer();
    groups_of(*mesh).abort(reason);
    told = groups_of(*mesh).status();  // an earlier reason, if the group failed before
  }
  const std::string message = message_of(told);
  write_error_file(message, call_stack, told_by_peer, is_own_code ? std::nullopt : std::optional(exit_code_of(told)));
  log_error(message);
  return told;
}

ExitCode RunScope::end_with(const absl::Status& reason, const std::string& call_stack) const {
  return exit_code_of(tell(reason, call_stack, /*is_own_code=*/false));
}

void RunScope::end_with_own_code(int code, const std::string& message) const {
  tell(make_error(static_cast<ExitCode>(code), message), "none", /*is_own_code=*/true).IgnoreError();
}

}  // namespace tessera
