#include "planner/measured/link_fit_file.h"

#include <nlohmann/json.hpp>

#include "planner/measured/measured_fields.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kMostFitBytes = 4 << 10, kMostFitValues = 64;

}  // namespace

absl::StatusOr<LinkFit> parse_link_fit(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  LinkFit fit;
  if (const auto root = parse_measurements(text, diagnostics, kMostFitValues)) {
    MeasuredFields fields(*root, "", diagnostics);
    fit.round_s = fields.number("round_s");
    fit.message_s = fields.number("message_s");
    fit.byte_s = fields.number("byte_s");
    fit.add_s = fields.number("add_s");
    fields.finish();
  }
  TESSERA_RETURN_IF_ERROR(
      status_of(diagnostics, "[T0628] hint: tessera bench collectives --fit-file writes such files"));
  return fit;
}

absl::StatusOr<LinkFit> read_link_fit(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_input_file(path, "fit of links", kMostFitBytes, ExitCode::kCorruptData));
  return parse_link_fit(text, path.string());
}

std::string to_json(const LinkFit& fit) {
  const nlohmann::ordered_json json = {
      {"round_s", fit.round_s}, {"message_s", fit.message_s}, {"byte_s", fit.byte_s}, {"add_s", fit.add_s}};
  return json.dump(2) + "\n";
}

}  // namespace tessera
