#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "workshop/bench/samples.h"

namespace tessera {

/// The times of one pass over a flat run of `numel` elements, such as an optimizer's step. `limit` has the times of
/// code that only reads and writes as many bytes.
struct PassTiming {
  std::string name;
  std::size_t numel = 0;
  std::size_t bytes = 0;  ///< bytes read and written
  Samples pass, limit;
};

/// Returns {"cases": [{"name", "numel", "bytes", "samples_s", "median_s", "limit_s", "of_limit"}]}.
nlohmann::json to_json(const std::vector<PassTiming>& timings);

}  // namespace tessera
