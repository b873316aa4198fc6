#include "engine/checkpoint/inexact.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>

#include "runtime/base/noise.h"
#include "runtime/config/strategy_names.h"

namespace tessera {

std::optional<std::string> other_noise(const Strategy& strategy, std::int64_t saved_version) {
  const bool rounds_states = strategy.optimizer.state_dtype != StateDType::kF32;
  // Noise of version 2 differs from noise of version 3 only where states have 8 bits.
  const bool is_same =
      saved_version == kNoiseVersion || (saved_version == 2 && strategy.optimizer.state_dtype != StateDType::k8Bit);
  if (is_same || !(rounds_states || draws_gradients(strategy.compression.method))) return std::nullopt;
  return c10::str(rounds_states ? "states will be rounded" : "of gradients other ones will be sent",
                  " by other noise: the program that saved had version ", saved_version, " of it, and this one has ",
                  kNoiseVersion);
}

std::optional<std::string> unknown_samples(const Strategy& strategy, std::int64_t steps, std::int64_t samples) {
  const LrScheduleConfig& schedule = strategy.lr_schedule;
  const bool counts_samples = schedule.warmup_samples > 0 || schedule.warmup_epochs > 0;
  if (!counts_samples || samples > 0 || steps == 0) return std::nullopt;
  return c10::str("the rate rises from its beginning again: it is not known how many samples the ", steps,
                  " steps before had, since the run that saved did not tell backward");
}

std::optional<std::string> read_rates(const Strategy& strategy, const std::vector<std::optional<double>>& saved,
                                      const char* source, std::vector<double>& rates) {
  if (strategy.lr_schedule.type != LrScheduleType::kManual || saved.empty()) return std::nullopt;
  if (saved.size() != rates.size())
    return c10::str("the run has other groups of parameters than the ", source, ", so rates set by hand were left out");
  std::ranges::transform(saved, rates.begin(), [](const std::optional<double>& rate) {
    return rate.value_or(std::numeric_limits<double>::quiet_NaN());
  });
  return std::nullopt;
}

}  // namespace tessera
