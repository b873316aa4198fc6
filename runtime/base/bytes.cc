#include "runtime/base/bytes.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

struct Unit {
  std::string_view name;
  std::int64_t bytes;
};

constexpr std::int64_t kKi = 1024, kKilo = 1000;
constexpr std::array<Unit, 11> kUnits = {{{"B", 1},
                                          {"KiB", kKi},
                                          {"MiB", kKi* kKi},
                                          {"GiB", kKi* kKi* kKi},
                                          {"TiB", kKi* kKi* kKi* kKi},
                                          {"PiB", kKi* kKi* kKi* kKi* kKi},
                                          {"KB", kKilo},
                                          {"MB", kKilo* kKilo},
                                          {"GB", kKilo* kKilo* kKilo},
                                          {"TB", kKilo* kKilo* kKilo* kKilo},
                                          {"PB", kKilo* kKilo* kKilo* kKilo* kKilo}}};
constexpr std::size_t kBinaryUnits = 6;  // number of the binary units, which are the first in the list

absl::Status bad_bytes(std::string_view text, const std::string& why_and_hint) {
  return make_error(ExitCode::kConfig, fmt::format("{} is not a number of bytes{}", quoted_text(text), why_and_hint));
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Returns the length of the leading "12" or "12.5"; 0 if there is none.
std::size_t number_length(std::string_view text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  if (end == 0 || end + 1 >= text.size() || text[end] != '.' || !is_digit(text[end + 1])) return end;
  ++end;
  while (end < text.size() && is_digit(text[end])) ++end;
  return end;
}

absl::StatusOr<std::int64_t> bytes_of_unit(std::string_view text, std::string_view name) {
  if (name.empty()) return 1;
  std::vector<std::string> known;
  for (const Unit& unit : kUnits) {
    if (unit.name == name) return unit.bytes;
    known.emplace_back(unit.name);
  }
  return bad_bytes(text, fmt::format(": unknown unit {}{}", quoted_text(name), hint_of_names(name, known)));
}

}  // namespace

std::string format_bytes(std::int64_t bytes) {
  const double magnitude = std::abs(static_cast<double>(bytes));
  if (magnitude < kKi) return fmt::format("{} B", bytes);
  std::size_t unit = 1;
  // A value within 0.005 of the next unit would print as "1024.00", so the next unit is used for it.
  while (unit + 1 < kBinaryUnits && magnitude / static_cast<double>(kUnits[unit].bytes) >= 1023.995) ++unit;
  const double value = static_cast<double>(bytes) / static_cast<double>(kUnits[unit].bytes);
  return fmt::format("{:.2f} {}", value, kUnits[unit].name);
}

absl::StatusOr<std::int64_t> parse_bytes(std::string_view text) {
  const std::size_t length = number_length(text);
  if (length == 0) return bad_bytes(text, ". [T0392] hint: it begins with a digit, such as \"8GiB\" or \"500MB\"");
  std::string_view name = text.substr(length);
  if (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t unit, bytes_of_unit(text, name));

  const std::string number(text.substr(0, length));
  // long double has 64 bits of mantissa on x86-64, so whole numbers of bytes are exact.
  const long double bytes = std::round(std::strtold(number.c_str(), nullptr) * static_cast<long double>(unit));
  if (!(bytes < 9223372036854775808.0L))
    return bad_bytes(text, ": it is more than 2^63 - 1. [T0393] hint: write what the machine has, such as \"64GiB\"");
  return static_cast<std::int64_t>(bytes);
}

}  // namespace tessera
