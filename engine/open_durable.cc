#include "engine/open_durable.h"

#include "engine/job/outcomes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {

std::unique_ptr<DurableFiles> open_durable(const DurableConfig& config, const MemoryPlan& plan,
                                           const std::string& layout, Collectives& control) {
  auto files = std::make_unique<DurableFiles>(config, plan, layout, control.rank());
  files->choose(value_or_throw(share_outcomes(control, "commits found", [&] { return files->look(); })));
  throw_if_error(share_status(control, "commits chosen", status_from([&] { return files->forget_later(); })));
  if (files->last() && control.rank() == 0)
    log_info(c10::str(files->folder(), " holds step ", files->last()->step, ", from which resume_durable goes on"));
  return files;
}

}  // namespace tessera
