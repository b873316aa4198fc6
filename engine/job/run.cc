#include "tessera/run.h"

#include <exception>

#include "engine/job/last_words.h"
#include "engine/job/run_scope.h"
#include "tessera/error.h"

namespace tessera {

int run(const std::function<void()>& body) {
  if (RunScope::current)
    throw Error(ExitCode::kUsage,
                "tessera::run was called inside tessera::run. [T0262] hint: one run is around all of main");
  RunScope scope;
  try {
    body();
    scope.leave_together();
    return static_cast<int>(ExitCode::kOk);
  } catch (...) {
    return static_cast<int>(scope.end_with(status_of(std::current_exception())));
  }
}

}  // namespace tessera
