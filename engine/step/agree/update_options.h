#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// A key of the strategy's "optimizer" that a program may change while it trains (Engine::set_option).
struct OptionKey {
  const char* name;          ///< "weight_decay", "betas", "muon.momentum"
  std::size_t first, count;  ///< which of UpdateOptions' numbers it is; "betas" are two
};

/// The numbers of the update rule that a program may change while it trains: everybody's, and each group's
/// (OptimizerConfig::groups). What was not set by hand is as the strategy says. Where the rule keeps something of them
/// (optimizers, kernels' tables), it looks at `version` when a step begins.
class UpdateOptions {
 public:
  static constexpr std::size_t kNumbers = 10;

  explicit UpdateOptions(const OptimizerConfig& optimizer);

  static std::span<const OptionKey> keys();
  /// What checkpoints call a number: "beta1".
  static const char* name_of(std::size_t number);
  /// `number` of `kNumbers`, or nothing where none has that name.
  static std::optional<std::size_t> number_named(const std::string& name);
  /// A place in `all` for people: "eps of group 1 (blocks)".
  static std::string words_of(const OptimizerConfig& optimizer, std::size_t place);

  /// Sets a number of a group, or everybody's, which groups have that have none of their own, by hand or in the
  /// strategy.
  void set(std::size_t number, double value, std::optional<std::size_t> group);

  /// What a group is updated with, or what is in none (FlatParameter::kNoGroup). Without OptimizerConfig::groups.
  OptimizerConfig of(std::size_t group) const;
  /// The numbers of a key, as they are in `config`.
  static std::vector<double> numbers_in(const OptimizerConfig& config, const OptionKey& key);

  /// Another one after each change.
  std::uint64_t version() const { return version_; }

  /// As set by hand: everybody's [kNumbers], then each group's; NaN: not set.
  std::span<const double> all() const { return values_; }
  /// REQUIRES: `all` of options for the same groups.
  void restore(std::span<const double> all);

 private:
  void apply(std::size_t row, OptimizerConfig& config) const;

  OptimizerConfig everybodys_;  ///< as in the strategy, without groups
  std::vector<ParameterGroup> groups_;
  std::vector<double> values_;
  std::uint64_t version_ = 0;
};

/// UpdateOptions::all for files: of each row the numbers that were set, by name. Empty where none was.
std::vector<std::map<std::string, double>> options_by_name(std::span<const double> all);
/// The way back, into `all`. Says what is wrong where the rows are of other groups, or a name is unknown, and changes
/// nothing then.
std::optional<std::string> read_options(const std::vector<std::map<std::string, double>>& rows,
                                        std::vector<double>& all);

}  // namespace tessera
