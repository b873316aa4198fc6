#include "engine/step/agree/update_options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "optim/optimizer.h"
#include "runtime/config/strategy_names.h"
#include "sharding/unit.h"

namespace tessera {
namespace {

struct OptionNumber {
  const char* name;
  double (*get)(const OptimizerConfig&);
  void (*set)(OptimizerConfig&, double);
};

#define TESSERA_OPTION(name, member)                                                                \
  OptionNumber {                                                                                    \
    name, [](const OptimizerConfig& c) -> double { return static_cast<double>(c.member); },         \
        [](OptimizerConfig& c, double value) { c.member = static_cast<decltype(c.member)>(value); } \
  }

constexpr std::array<OptionNumber, UpdateOptions::kNumbers> kAll = {TESSERA_OPTION("weight_decay", weight_decay),
                                                                    TESSERA_OPTION("eps", eps),
                                                                    TESSERA_OPTION("beta1", beta1),
                                                                    TESSERA_OPTION("beta2", beta2),
                                                                    TESSERA_OPTION("momentum", momentum),
                                                                    TESSERA_OPTION("dampening", dampening),
                                                                    TESSERA_OPTION("nesterov", nesterov),
                                                                    TESSERA_OPTION("alpha", alpha),
                                                                    TESSERA_OPTION("lr_decay", lr_decay),
                                                                    TESSERA_OPTION("muon.momentum", muon.momentum)};
#undef TESSERA_OPTION

constexpr OptionKey kKeys[] = {{"weight_decay", 0, 1}, {"eps", 1, 1},       {"betas", 2, 2},
                               {"momentum", 4, 1},     {"dampening", 5, 1}, {"nesterov", 6, 1},
                               {"alpha", 7, 1},        {"lr_decay", 8, 1},  {"muon.momentum", 9, 1}};

}  // namespace

UpdateOptions::UpdateOptions(const OptimizerConfig& optimizer)
    : everybodys_(config_of(optimizer, ParameterGroup{})),
      groups_(optimizer.groups),
      values_((1 + groups_.size()) * kNumbers, std::numeric_limits<double>::quiet_NaN()) {}

std::span<const OptionKey> UpdateOptions::keys() { return kKeys; }

const char* UpdateOptions::name_of(std::size_t number) { return kAll[number].name; }

std::optional<std::size_t> UpdateOptions::number_named(const std::string& name) {
  const auto found = std::ranges::find_if(kAll, [&](const OptionNumber& each) { return each.name == name; });
  if (found == kAll.end()) return std::nullopt;
  return static_cast<std::size_t>(found - kAll.begin());
}

std::string UpdateOptions::words_of(const OptimizerConfig& optimizer, std::size_t place) {
  const std::size_t row = place / kNumbers;
  const std::string whose = row == 0 ? std::string() : " of " + name_of_group(optimizer, row - 1);
  return kAll[place % kNumbers].name + whose;
}

void UpdateOptions::set(std::size_t number, double value, std::optional<std::size_t> group) {
  double& place = values_[(group ? 1 + *group : 0) * kNumbers + number];
  if (place == value) return;
  place = value;
  ++version_;
}

void UpdateOptions::apply(std::size_t row, OptimizerConfig& config) const {
  for (std::size_t i = 0; i < kNumbers; ++i) {
    const double value = values_[row * kNumbers + i];
    if (!std::isnan(value)) kAll[i].set(config, value);
  }
}

OptimizerConfig UpdateOptions::of(std::size_t group) const {
  OptimizerConfig config = everybodys_;
  apply(0, config);
  if (group == FlatParameter::kNoGroup) return config;
  config = config_of(config, groups_[group]);
  apply(1 + group, config);
  return config;
}

std::vector<double> UpdateOptions::numbers_in(const OptimizerConfig& config, const OptionKey& key) {
  std::vector<double> numbers;
  for (std::size_t i = key.first; i < key.first + key.count; ++i) numbers.push_back(kAll[i].get(config));
  return numbers;
}

void UpdateOptions::restore(std::span<const double> all) {
  values_.assign(all.begin(), all.end());
  ++version_;
}

std::vector<std::map<std::string, double>> options_by_name(std::span<const double> all) {
  std::vector<std::map<std::string, double>> rows(all.size() / UpdateOptions::kNumbers);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!std::isnan(all[i])) rows[i / UpdateOptions::kNumbers][kAll[i % UpdateOptions::kNumbers].name] = all[i];
  }
  const bool has_some = std::ranges::any_of(rows, [](const auto& row) { return !row.empty(); });
  return has_some ? rows : std::vector<std::map<std::string, double>>();
}

std::optional<std::string> read_options(const std::vector<std::map<std::string, double>>& rows,
                                        std::vector<double>& all) {
  std::vector<double> read(all.size(), std::numeric_limits<double>::quiet_NaN());
  if (!rows.empty() && rows.size() * UpdateOptions::kNumbers != all.size())
    return "the run has other groups of parameters, so options set by hand were left out";
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (const auto& [name, value] : rows[row]) {
      const std::optional<std::size_t> number = UpdateOptions::number_named(name);
      if (!number) return "the option " + name + " is unknown here, so options set by hand were left out";
      read[row * UpdateOptions::kNumbers + *number] = value;
    }
  }
  all = std::move(read);
  return std::nullopt;
}

}  // namespace tessera
