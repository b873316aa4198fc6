#pragma once

#include <cstdio>
#include <string>

namespace tessera::app {

/// Formats `value` with a printf format for one double, such as "%.2f" or "%g MiB". The result has at most 47
/// characters.
inline std::string number_text(double value, const char* format) {
  char text[48];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace tessera::app
