#include "offload/files/fault_text.h"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <map>
#include <string>
#include <utility>

#include "runtime/base/hint.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

const std::map<std::string, FaultSite> kSites = {{"open", FaultSite::kOpen},     {"reserve", FaultSite::kReserve},
                                                 {"read", FaultSite::kRead},     {"write", FaultSite::kWrite},
                                                 {"fsync", FaultSite::kFsync},   {"rename", FaultSite::kRename},
                                                 {"unlink", FaultSite::kUnlink}, {"mkdir", FaultSite::kMkdir},
                                                 {"submit", FaultSite::kSubmit}, {"cqe", FaultSite::kCqe}};

const std::map<std::string, FaultAction> kActions = {{"errno", FaultAction::kErrno},
                                                     {"short", FaultAction::kShort},
                                                     {"bitflip", FaultAction::kBitFlip},
                                                     {"torn", FaultAction::kTorn},
                                                     {"delay", FaultAction::kDelay},
                                                     {"crash", FaultAction::kCrash},
                                                     {"drop_unsynced", FaultAction::kDropUnsynced}};

const std::map<std::string, std::int64_t> kErrnos = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EAGAIN", EAGAIN}, {"EINTR", EINTR},   {"EINVAL", EINVAL},
    {"EDQUOT", EDQUOT}, {"EFBIG", EFBIG},   {"EMFILE", EMFILE}, {"EACCES", EACCES}, {"EPERM", EPERM},
    {"EROFS", EROFS},   {"ENOENT", ENOENT}, {"ENOMEM", ENOMEM}, {"EBUSY", EBUSY},   {"EOPNOTSUPP", EOPNOTSUPP}};

template <typename Value>
std::vector<std::string> names_of(const std::map<std::string, Value>& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.push_back(name);
  return names;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

constexpr const char kRuleHint[] = ". [T0373] hint: a rule is such as \"write nth=3 errno=ENOSPC path=commit\"";

absl::Status wrong(std::string_view rule, const std::string& what) {
  return make_error(ExitCode::kConfig, fmt::format("TESSERA_TEST_FAULTS: rule {}: {}{}", quoted_text(rule), what,
                                                   has_hint(what) ? "" : kRuleHint));
}

bool read_number(std::string_view text, std::int64_t least, std::int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= least;
}

// Reads "errno=ENOSPC" into action and number. Returns false if the value is missing or wrong.
bool read_action(FaultAction action, std::string_view value, FaultRule& rule) {
  rule.action = action;
  switch (action) {
    case FaultAction::kErrno:
      if (const auto found = kErrnos.find(std::string(value)); found != kErrnos.end()) {
        rule.number = found->second;
        return true;
      }
      return read_number(value, 1, rule.number);
    case FaultAction::kCrash:
      rule.number = 137;
      return value.empty() || (read_number(value, 0, rule.number) && rule.number <= 255);
    case FaultAction::kDropUnsynced:
      rule.keep_renames = !value.empty();
      return value.empty() || value == "keep_renames";
    default:
      return read_number(value, 0, rule.number);
  }
}

absl::StatusOr<FaultRule> parse_rule(std::string_view text) {
  const std::vector<std::string_view> words = split(text, ' ');
  FaultRule rule;
  const auto site = kSites.find(std::string(words.front()));
  if (site == kSites.end())
    return wrong(text, fmt::format("{} is no site{}", quoted_text(words.front()),
                                   hint_of_names(words.front(), names_of(kSites))));
  rule.site = site->second;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::size_t equals = std::min(words[i].find('='), words[i].size());
    const std::string key(words[i].substr(0, equals));
    const std::string_view value = equals < words[i].size() ? words[i].substr(equals + 1) : std::string_view();
    bool good = true;
    if (key == "path") {
      rule.path = std::string(value);
    } else if (key == "nth") {
      good = read_number(value, 1, rule.nth);
    } else if (key == "every") {
      good = read_number(value, 1, rule.every);
    } else if (const auto action = kActions.find(key); action != kActions.end()) {
      if (rule.action != FaultAction::kNone) return wrong(text, "has two actions, want one");
      good = read_action(action->second, value, rule);
    } else {
      return wrong(text, fmt::format("{} is no action{}", quoted_text(key), hint_of_names(key, names_of(kActions))));
    }
    if (!good) return wrong(text, fmt::format("{} has a wrong or missing value", quoted_text(words[i])));
  }
  if (rule.action == FaultAction::kNone) return wrong(text, "has no action; actions are " + joined(names_of(kActions)));
  if (!fits_together(rule.site, rule.action)) return wrong(text, "this action means nothing at this site");
  if ((rule.nth > 0) == (rule.every > 0)) return wrong(text, "want one of nth=N and every=N");
  return rule;
}

}  // namespace

absl::StatusOr<std::vector<FaultRule>> parse_fault_rules(std::string_view text) {
  std::vector<FaultRule> rules;
  for (const std::string_view part : split(text, ';')) {
    if (part.find_first_not_of(' ') == std::string_view::npos) continue;
    TESSERA_ASSIGN_OR_RETURN(FaultRule rule, parse_rule(part));
    rules.push_back(std::move(rule));
  }
  return rules;
}

}  // namespace tessera
