#include <cstdlib>

#include "offload/files/fault_environment.h"
#include "offload/files/fault_text.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

absl::Status take() {
  const char* const text = std::getenv("TESSERA_TEST_FAULTS");
  if (text == nullptr || *text == '\0') return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(std::vector<FaultRule> rules, parse_fault_rules(text));
  // The plan is never uninstalled, since there may be I/O until the process ends. A plan that a test installed itself
  // is not replaced.
  static FaultPlan* const plan = new FaultPlan(std::move(rules));
  FaultPlan* none = nullptr;
  if (installed_fault_plan.compare_exchange_strong(none, plan, std::memory_order_acq_rel))
    log_warning(std::string("TESSERA_TEST_FAULTS: faults on purpose are in force: ") + text);
  return absl::OkStatus();
}

}  // namespace

absl::Status take_faults_from_environment() {
  static const absl::Status* const taken = new absl::Status(take());
  return *taken;
}

}  // namespace tessera
