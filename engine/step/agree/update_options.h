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
  std::size_t first, count;  ///< range of UpdateOptions' numbers that belong to the key; "betas" has two
};

/// The numbers of the update rule that a program may change while it trains: the common ones, and each group's
/// (OptimizerConfig::groups). Numbers that were not set by hand come from the strategy. Code that keeps copies of the
/// numbers (optimizers, tables of kernels) looks at `version` when a step begins.
class UpdateOptions {
 public:
  static constexpr std::size_t kNumbers = 10;

  explicit UpdateOptions(const OptimizerConfig& optimizer);

  static std::span<const OptionKey> keys();
  /// Returns the name that a number has in checkpoints, such as "beta1".
  static const char* name_of(std::size_t number);
  /// Returns the index (below `kNumbers`) of the number whose name_of is `name`, or nothing if there is none.
  static std::optional<std::size_t> number_named(const std::string& name);
  /// Returns a text that names a place in `all`: "eps of group 1 (blocks)".
  static std::string words_of(const OptimizerConfig& optimizer, std::size_t place);

  /// Sets a number of a group. If `group` is empty, it sets the common number. Groups use the common number unless they
  /// have their own, set by hand or in the strategy.
  void set(std::size_t number, double value, std::optional<std::size_t> group);

  /// Returns the configuration for updates of a group, or of the parameters in no group (FlatParameter::kNoGroup). Its
  /// OptimizerConfig::groups is empty.
  OptimizerConfig of(std::size_t group) const;
  /// Returns the numbers that `config` has for a key.
  static std::vector<double> numbers_in(const OptimizerConfig& config, const OptionKey& key);

  /// Returns a count that changes with each change of a number.
  std::uint64_t version() const { return version_; }

  /// Returns the numbers set by hand: the common ones [kNumbers], then each group's [kNumbers]. NaN means not set.
  std::span<const double> all() const { return values_; }
  /// REQUIRES: `all` comes from `all()` of options for the same groups.
  void restore(std::span<const double> all);

 private:
  void apply(std::size_t row, OptimizerConfig& config) const;

  OptimizerConfig everybodys_;  ///< copy of the strategy's configuration, without groups
  std::vector<ParameterGroup> groups_;
  std::vector<double> values_;
  std::uint64_t version_ = 0;
};

/// Returns UpdateOptions::all as files keep it: for each row the numbers that were set, by name. The result is empty if
/// no number of any row was set.
std::vector<std::map<std::string, double>> options_by_name(std::span<const double> all);
/// Writes the numbers of `rows`, which options_by_name returned, to `all`. If the rows belong to other groups, or if a
/// name is unknown, the function changes nothing and returns a text that says so.
std::optional<std::string> read_options(const std::vector<std::map<std::string, double>>& rows,
                                        std::vector<double>& all);

}  // namespace tessera
