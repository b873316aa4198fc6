#include "runtime/config/strategy_file.h"

#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

#include "runtime/base/bytes.h"
#include "runtime/base/input_file.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_reader.h"
#include "runtime/config/strategy_table.h"
#include "runtime/config/transport_rows.h"

namespace tessera {
namespace {

/// The last line of an error if none of its problems has its own hint.
constexpr const char kStrategyHint[] = "[T0512] hint: docs/strategy.md lists every key and what it may be";

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;

/// Returns whether this process is rank 0, or has no variable RANK. All ranks read the same file, but only
/// one of them warns.
bool is_first_rank() {
  const char* const rank = std::getenv("RANK");
  return !rank || std::string_view(rank) == "0";
}

absl::Status too_large(const std::string& name) {
  return make_error(
      ExitCode::kConfig,
      fmt::format("{}:1:1: /: larger than {}: this is not a strategy file. [T0513] hint: name the right file", name,
                  format_bytes(static_cast<std::int64_t>(kMaxFileBytes))));
}

}  // namespace

absl::StatusOr<Strategy> read_strategy(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_input_file(path, "strategy file", kMaxFileBytes));
  return parse_strategy(text, path.string());
}

absl::StatusOr<Strategy> parse_strategy(const std::string& text, const std::string& name) {
  if (text.size() > kMaxFileBytes) return too_large(name);
  Diagnostics diagnostics(name, text);
  Strategy strategy;
  std::optional<std::string> warning;
  if (auto root = parse_json(text, diagnostics)) {
    warning = renew_old_keys(*root, diagnostics, name);
    strategy = StrategyReader(diagnostics).read(*root);
  }
  TESSERA_RETURN_IF_ERROR(diagnostics.to_status(kStrategyHint));
  if (warning && is_first_rank()) log_warning(*warning);
  return as_launched(std::move(strategy));
}

Strategy as_launched(Strategy strategy) {
  const char* const strict = std::getenv("TESSERA_STRICT");
  if (!strict || std::string_view(strict) != "1") return strategy;
  strategy.host_sharing = false;
  strategy.check.values = strategy.check.values || !has(strategy.comm.transport, transport_traits::kOnGpu);
  return strategy;
}

absl::Status check_strategy(const Strategy& strategy) {
  const std::string text = strategy.to_json();
  Diagnostics diagnostics("the strategy given to the Engine, as JSON", text);
  if (const auto root = parse_json(text, diagnostics)) StrategyReader(diagnostics).read_from_code(*root);
  return diagnostics.to_status(kStrategyHint);
}

std::string Strategy::to_json() const {
  Strategy resolved = *this;
  fill_in_defaults(resolved.optimizer);
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  for (const StrategyKey& key : strategy_keys()) {
    root[nlohmann::ordered_json::json_pointer(key.pointer)] = key.field.get(resolved);
  }
  return root.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace tessera
