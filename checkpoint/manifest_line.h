#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// Writes the first line of manifest.json, with which the JSON object begins: version and hash of the lines behind it.
std::string manifest_line(std::int64_t version, std::uint64_t hash);

/// Reads the first line. Returns false if `line`, with its end, differs in any byte from what manifest_line writes.
bool read_manifest_line(std::string_view line, std::int64_t& version, std::uint64_t& hash);

}  // namespace tessera
