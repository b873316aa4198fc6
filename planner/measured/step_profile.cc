#include "planner/measured/step_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "planner/measured/measured_fields.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "sharding/layout/schedule.h"

namespace tessera {
namespace {

constexpr std::size_t kMostFileBytes = std::size_t{32} << 20;
constexpr std::size_t kMostEntries = Schedule::kLongestRound;
constexpr std::size_t kMostValues = 4 * kMostEntries + 16;
constexpr std::int64_t kMostElements = 1'000'000'000'000'000;

ProfileEntry read_entry(MeasuredFields fields) {
  ProfileEntry entry;
  entry.unit = fields.text("unit");
  entry.pass = fields.word("pass", {"forward", "backward"}) == "backward" ? RoundPass::kBackward : RoundPass::kForward;
  entry.seconds = fields.number("seconds");
  fields.finish();
  return entry;
}

std::vector<ProfileEntry> read_entries(MeasuredFields& profile, Diagnostics& diagnostics) {
  std::vector<ProfileEntry> entries;
  const JsonNode* const list = profile.list("entries");
  if (!list) return entries;
  if (list->children.empty() || list->children.size() > kMostEntries)
    profile.wrong("entries", fmt::format("must be a list of 1 to {}, got {}", kMostEntries, describe(*list)));
  for (std::size_t i = 0; i < std::min(list->children.size(), kMostEntries); ++i) {
    const JsonNode& child = list->children[i];
    const std::string place = fmt::format("/entries/{}", i);
    if (child.is_object()) {
      entries.push_back(read_entry(MeasuredFields(child, place, diagnostics)));
    } else {
      diagnostics.add(child.offset, place, "must be an object, got " + describe(child));
    }
  }
  return entries;
}

StepProfile read(MeasuredFields fields, Diagnostics& diagnostics) {
  StepProfile profile;
  profile.entries = read_entries(fields, diagnostics);
  if (auto update = fields.object("update")) {
    profile.update_seconds = update->number("seconds");
    profile.updated_elements = update->integer("elements", 0, kMostElements);
    if (profile.update_seconds > 0 && profile.updated_elements == 0)
      update->wrong("elements", "must be above 0 where the update takes time");
    update->finish();
  }
  profile.rest_seconds = fields.number("rest_s");
  fields.finish();
  return profile;
}

}  // namespace

absl::StatusOr<std::vector<int>> units_of(const StepProfile& profile, const MemoryPlan& plan) {
  std::map<std::string_view, int> index_of;
  const std::vector<UnitShape>& units = plan.units();
  for (std::size_t i = 0; i < units.size(); ++i) index_of.emplace(units[i].name, static_cast<int>(i));
  std::vector<int> indices;
  for (const ProfileEntry& entry : profile.entries) {
    const auto found = index_of.find(entry.unit);
    if (found == index_of.end()) {
      std::vector<std::string> names;
      for (const UnitShape& unit : units) names.push_back(unit.name);
      return make_error(
          ExitCode::kCorruptData,
          fmt::format("profile: /entries/{}/unit: {} is no unit of the plan, which has {} of them{}; "
                      "measure the profile with the same model and the same \"units\"",
                      indices.size(), quoted_text(entry.unit), units.size(), hint_of_names(entry.unit, names)));
    }
    indices.push_back(found->second);
  }
  return indices;
}

void name_units_without_times(const StepProfile& profile, const MemoryPlan& plan, std::vector<std::string>& left_out) {
  std::set<std::string_view> timed;
  for (const ProfileEntry& entry : profile.entries) timed.insert(entry.unit);
  std::vector<std::string> missing;
  for (const UnitShape& unit : plan.units())
    if (!unit.groups.empty() && !timed.contains(unit.name)) missing.push_back(unit.name);
  if (missing.empty()) return;
  const std::string others = missing.size() > 1 ? fmt::format(" and of {} more units", missing.size() - 1) : "";
  left_out.push_back(
      fmt::format("compute of {}{}, of which the profile has no times: it is of another model, or of a "
                  "step that did not use them",
                  missing[0], others));
}

absl::StatusOr<StepProfile> parse_step_profile(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  StepProfile profile;
  if (const auto root = parse_measurements(text, diagnostics, kMostValues))
    profile = read(MeasuredFields(*root, "", diagnostics), diagnostics);
  TESSERA_RETURN_IF_ERROR(status_of(diagnostics, "[T0636] hint: tessera train --profile writes such files"));
  return profile;
}

absl::StatusOr<StepProfile> read_step_profile(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_input_file(path, "profile", kMostFileBytes, ExitCode::kCorruptData));
  return parse_step_profile(text, path.string());
}

double StepProfile::step_seconds(double microbatches) const {
  double round = 0;
  for (const ProfileEntry& entry : entries) round += entry.seconds;
  return microbatches * round + update_seconds + rest_seconds;
}

std::string to_json(const StepProfile& profile) {
  nlohmann::ordered_json json;
  json["entries"] = nlohmann::ordered_json::array();
  for (const ProfileEntry& entry : profile.entries) {
    json["entries"].push_back({{"unit", entry.unit},
                               {"pass", entry.pass == RoundPass::kForward ? "forward" : "backward"},
                               {"seconds", entry.seconds}});
  }
  json["update"] = {{"seconds", profile.update_seconds}, {"elements", profile.updated_elements}};
  json["rest_s"] = profile.rest_seconds;
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tessera
