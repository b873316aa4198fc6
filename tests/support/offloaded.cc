#include "tests/support/offloaded.h"

#include <filesystem>

namespace tessera::testing {

std::string name_of(const Kept& kept) {
  return std::string(tessera::name_of(kept.param)) + (kept.master == MasterKind::kF32 ? ", whole masters, " : ", ") +
         tessera::name_of(kept.state);
}

void put_below(Strategy& s, const Below& below) {
  const auto state = [](double fraction) {
    return fraction > 0 ? OffloadedState{Tier::kNvme, fraction} : OffloadedState{};
  };
  if (below.parameters > 0) s.offload.parameters = state(below.parameters);  // else as it was placed
  s.offload.masters = state(below.masters);
  s.offload.moments = state(below.moments);
  s.offload.paths = {std::filesystem::temp_directory_path().string()};
  s.offload.record_bytes = below.record_bytes;
  s.offload.cache_bytes = below.cache_bytes;
  s.offload.queue_depth = below.queue_depth;
}

Adjust adjusted_to(const Kept& kept, const Below* below) {
  return [&kept, below](Strategy& s) {
    s.mixed_precision.master = kept.master;
    s.optimizer.state_dtype = kept.state;
    if (below) put_below(s, *below);
  };
}

Strategy strategy_of(const Kept& kept, const Placed& placed, const Below* below) {
  return strategy_for(placed, adjusted_to(kept, below), kept.param);
}

}  // namespace tessera::testing
