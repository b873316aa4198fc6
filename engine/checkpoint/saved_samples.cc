#include "engine/checkpoint/saved_samples.h"

#include <c10/util/StringUtil.h>

namespace tessera {

std::optional<std::string> unknown_samples(const Strategy& strategy, std::int64_t steps, std::int64_t samples) {
  const LrScheduleConfig& schedule = strategy.lr_schedule;
  const bool counts_samples = schedule.warmup_samples > 0 || schedule.warmup_epochs > 0;
  if (!counts_samples || samples > 0 || steps == 0) return std::nullopt;
  return c10::str("the rate rises from its beginning again: it is not known how many samples the ", steps,
                  " steps before had, since the run that saved did not tell backward");
}

}  // namespace tessera
