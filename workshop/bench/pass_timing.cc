#include "workshop/bench/pass_timing.h"

#include <cstdint>

namespace tessera {

nlohmann::json to_json(const std::vector<PassTiming>& timings) {
  nlohmann::json cases = nlohmann::json::array();
  for (const PassTiming& timing : timings) {
    std::vector<double> samples;
    for (const std::int64_t ns : timing.pass.ns) samples.push_back(static_cast<double>(ns) * 1e-9);
    cases.push_back({{"name", timing.name},
                     {"numel", timing.numel},
                     {"bytes", timing.bytes},
                     {"samples_s", samples},
                     {"median_s", timing.pass.median_s()},
                     {"limit_s", timing.limit.median_s()},
                     {"of_limit", timing.limit.median_s() / timing.pass.median_s()}});
  }
  return {{"cases", cases}};
}

}  // namespace tessera
