#include "engine/parameters/parameter_groups.h"

#include <c10/util/StringUtil.h>
#include <fnmatch.h>

#include <algorithm>

#include "optim/optimizer.h"
#include "runtime/base/text.h"
#include "runtime/base/text_table.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_names.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(ExitCode::kConfig, "/optimizer/groups: " + what); }

[[noreturn]] void throw_fits_nothing(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer,
                                     std::size_t index, const std::string& pattern) {
  std::vector<std::string> names;
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) { names.push_back(group.parameters[i].name); });
  const std::optional<std::int64_t> most = optimizer.groups[index].max_dim;
  refuse(name_of_group(optimizer, index) + ": \"" + pattern + "\" fits no parameter" +
         (most ? c10::str(" of at most ", *most, " dimensions") : std::string()) + hint_of_names(pattern, names));
}

/// Returns whether the parameter's name fits `pattern`, and whether it has at most the group's max_dim dimensions.
bool fits(const ParameterGroup& group, const std::string& pattern, const FlatParameter& parameter) {
  const auto most = static_cast<std::size_t>(group.max_dim.value_or(64));
  return parameter.sizes.size() <= most && is_named(parameter, pattern);
}

}  // namespace

bool is_named(const FlatParameter& parameter, const std::string& pattern) {
  const auto fits = [&](const std::string& name) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; };
  return fits(parameter.name) || std::ranges::any_of(parameter.aliases, fits);
}

void assign_groups(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer) {
  for (std::size_t index = 0; index < optimizer.groups.size(); ++index) {
    const ParameterGroup& wanted = optimizer.groups[index];
    for (const std::string& pattern : wanted.match) {
      bool fits_some = false;
      for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
        FlatParameter& parameter = group.parameters[i];
        if (!fits(wanted, pattern, parameter)) return;
        fits_some = true;
        if (parameter.group != FlatParameter::kNoGroup && parameter.group != index) {
          refuse("parameter " + parameter.name + " is in " + name_of_group(optimizer, parameter.group) + " and in " +
                 name_of_group(optimizer, index) + ". [T0254] hint: give narrower patterns, or \"max_dim\"");
        }
        parameter.group = index;
      });
      if (!fits_some) throw_fits_nothing(units, optimizer, index, pattern);
    }
  }
}

std::function<bool(const FlatParameter&)> matrices_of(const OptimizerConfig& optimizer) {
  if (has(optimizer.type, optimizer_traits::kTensors)) return [](const FlatParameter&) { return true; };
  if (!updates_whole_tensors(optimizer.type)) return nullptr;
  return [type = optimizer.type, groups = optimizer.groups](const FlatParameter& parameter) {
    if (parameter.sizes.size() != 2 || parameter.numel == 0) return false;
    for (const ParameterGroup& group : groups) {
      if (!group.type) continue;
      const auto lets_in = [&](const std::string& pattern) { return fits(group, pattern, parameter); };
      if (std::ranges::any_of(group.match, lets_in)) return *group.type == type;
    }
    return !parameter.is_embedding;
  };
}

std::string table_of_groups(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer) {
  const bool has_matrices = updates_whole_tensors(optimizer.type);
  if (optimizer.groups.empty() && !has_matrices) return "";
  TextTable table({left_column("group"), right_column("parameters"), right_column("elements"), right_column("in whole"),
                   right_column("of the rate"), right_column("weight decay"), right_column("betas"),
                   right_column("eps")});
  const auto add = [&](std::size_t index, const std::string& name, double lr_ratio, const OptimizerConfig& config) {
    std::int64_t parameters = 0, elements = 0, in_matrices = 0;
    for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
      if (!group.trainable || group.parameters[i].group != index) return;
      ++parameters;
      elements += group.parameters[i].numel;
      if (!group.matrices.empty()) in_matrices += group.parameters[i].numel;
    });
    table.add_row(
        {name, std::to_string(parameters), std::to_string(elements),
         has_matrices ? std::to_string(in_matrices) : std::string("-"), c10::str(lr_ratio),
         c10::str(config.weight_decay),
         has(config.type, optimizer_traits::kBetas) ? c10::str(config.beta1, ", ", config.beta2) : std::string(),
         has(config.type, optimizer_traits::kEps) ? c10::str(config.eps) : std::string()});
  };
  for (std::size_t index = 0; index < optimizer.groups.size(); ++index) {
    const ParameterGroup& group = optimizer.groups[index];
    const char* const note = group.layer_adaptation ? "" : ", not adapted";
    add(index, name_of_group(optimizer, index) + note, group.lr_ratio, config_of(optimizer, group));
  }
  add(FlatParameter::kNoGroup, optimizer.groups.empty() ? "all" : "the rest", 1.0, optimizer);
  return table.to_string();
}

}  // namespace tessera
