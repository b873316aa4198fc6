#pragma once

#include <cstdint>
#include <string>
#include <variant>

namespace tessera {

/// One named number, word or flag, such as a row's cell in a MetricsFile. Counts are int64, measurements double.
struct Metric {
  std::string name;                                             ///< "loss"; not empty
  std::variant<std::int64_t, double, bool, std::string> value;  ///< the number, word or flag
};

}  // namespace tessera
