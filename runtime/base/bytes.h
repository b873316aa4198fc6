#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// Formats bytes for people: "512 B", "1.50 GiB" (powers of 1024, two decimals), "-3.00 MiB".
std::string format_bytes(std::int64_t bytes);

/// Reads "8GiB", "1.5 GiB", "500MB" or "4096" (bytes). The suffix must be spelled exactly as here: B, KB, MB, GB, TB,
/// PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024). A fraction is rounded to the nearest byte.
///
/// Errors (exit code 78): the text has no number, a negative one, or one above 2^63 - 1; or its suffix is unknown (the
/// message names the nearest known suffix).
absl::StatusOr<std::int64_t> parse_bytes(std::string_view text);

/// A regular expression (ECMAScript) for the texts that `parse_bytes` reads. The JSON schema of the strategy file uses
/// it.
inline constexpr char kBytesPattern[] = "^[0-9]+(\\.[0-9]+)? ?(B|[KMGTP]i?B)?$";

}  // namespace tessera
