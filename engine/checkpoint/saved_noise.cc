#include "engine/checkpoint/saved_noise.h"

#include <c10/util/StringUtil.h>

#include "runtime/base/noise.h"
#include "runtime/config/strategy_names.h"

namespace tessera {

std::optional<std::string> other_noise(const Strategy& strategy, std::int64_t saved_version) {
  const bool rounds_states = strategy.optimizer.state_dtype != StateDType::kF32;
  // Versions 2 and 3 differ in 8-bit states only.
  const bool is_same =
      saved_version == kNoiseVersion || (saved_version == 2 && strategy.optimizer.state_dtype != StateDType::k8Bit);
  if (is_same || !(rounds_states || draws_gradients(strategy.compression.method))) return std::nullopt;
  return c10::str(rounds_states ? "states will be rounded" : "of gradients other ones will be sent",
                  " by other noise: the program that saved had version ", saved_version, " of it, and this one has ",
                  kNoiseVersion);
}

}  // namespace tessera
