#pragma once

#include <cstdint>
#include <string>
#include <variant>

namespace tessera {

/// One named number, text or flag, such as a cell of a row in a MetricsFile. Counts are int64, and measurements are
/// double.
struct Metric {
  std::string name;                                             ///< name, such as "loss"; not empty
  std::variant<std::int64_t, double, bool, std::string> value;  ///< the number, text or flag
};

}  // namespace tessera
