#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// Strategy::from_file and Strategy::from_json, for code that deals in statuses.
absl::StatusOr<Strategy> read_strategy(const std::filesystem::path& path);
absl::StatusOr<Strategy> parse_strategy(const std::string& text, const std::string& name = "strategy");

}  // namespace tessera
