#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// Writes the first line of manifest.json, with which the JSON object begins. It has the version, and the hash of the
/// following lines.
std::string manifest_line(std::int64_t version, std::uint64_t hash);

/// Reads the first line. Returns false if `line`, including its newline, differs in any byte from the line that
/// manifest_line writes.
bool read_manifest_line(std::string_view line, std::int64_t& version, std::uint64_t& hash);

}  // namespace tessera
