#include "engine/asynchronous/servers/served_definition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "engine/step/rules/tensor_rule.h"
#include "runtime/base/status.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_names.h"

namespace tessera {
namespace {

using Sizes = std::vector<std::int64_t>;

void expect_defined(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

/// Throws if no layout can be made of a group's sizes.
void expect_layout(const Sizes& numels, int parts) {
  std::int64_t left = std::int64_t{1} << 46;
  for (const std::int64_t numel : numels) {
    expect_defined(numel >= 0 && numel <= left, "sizes of parameters");
    left -= numel;
  }
  expect_defined(parts >= 1, "a number of parts");
}

/// Returns the product of sizes, or -1 if it is larger than `most`.
std::int64_t product_of(std::span<const std::int64_t> sizes, std::int64_t most) {
  if (std::ranges::find(sizes, std::int64_t{0}) != sizes.end()) return 0;
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (size < 0 || product > most / size) return -1;
    product *= size;
  }
  return product;
}

/// Returns whether all elements of a tensor lie within `numel` elements.
bool lies_within(const FlatParameter& parameter) {
  std::int64_t left = parameter.numel - 1;
  for (std::size_t i = 0; i < parameter.sizes.size() && parameter.numel > 0; ++i) {
    const std::int64_t steps = parameter.sizes[i] - 1, stride = parameter.strides[i];
    if (stride < 0 || (steps > 0 && stride > left / steps)) return false;
    left -= steps * stride;
  }
  return true;
}

/// Reads the shapes of a group's tensors, if the optimizer's rule needs whole tensors.
void read_matrices(const nlohmann::json& from, OptimizerType type, FlatGroup& flat) {
  const bool has_matrices = from.contains("matrices");
  expect_defined(!has_matrices || updates_whole_tensors(type), "matrices of a rule that has none");
  expect_defined(has_matrices || !has(type, optimizer_traits::kTensors),
                 "a rule of whole tensors without their shapes");
  if (!has_matrices) return;
  const std::vector<std::array<std::int64_t, 2>> matrices = from.at("matrices");
  const std::vector<Sizes> sizes = from.at("sizes"), strides = from.at("strides");
  const std::size_t count = flat.parameters.size();
  expect_defined(matrices.size() == count && sizes.size() == count && strides.size() == count, "shapes of tensors");
  for (std::size_t i = 0; i < count; ++i) {
    FlatParameter& parameter = flat.parameters[i];
    parameter.sizes = sizes[i];
    parameter.strides = strides[i];
    const bool has_shape = parameter.sizes.size() == parameter.strides.size() && lies_within(parameter) &&
                           product_of(parameter.sizes, parameter.numel) == parameter.numel &&
                           product_of(matrices[i], parameter.numel) == parameter.numel;
    expect_defined(has_shape, "the shape of a tensor");
    expect_defined(parameter.sizes.size() == 2 || has(type, optimizer_traits::kTensors), "the shape of a matrix");
    flat.matrices.push_back({matrices[i][0], matrices[i][1]});
  }
}

/// Reads a group without its parts.
FlatGroup read_group(const nlohmann::json& from, const OptimizerConfig& optimizer) {
  const Sizes numels = from.at("numels"), options = from.at("options");
  expect_defined(numels.size() == options.size() && !numels.empty(), "a group's parameters");
  const int parts = from.at("parts");
  expect_layout(numels, parts);
  FlatGroup flat;
  flat.index = from.at("group");
  flat.layout = Layout::pack(numels, parts);
  for (std::size_t i = 0; i < numels.size(); ++i) {
    const auto known = static_cast<std::int64_t>(optimizer.groups.size());
    expect_defined(options[i] >= -1 && options[i] < known, "a group of the optimizer");
    FlatParameter& parameter = flat.parameters.emplace_back();
    parameter.name = "parameter " + std::to_string(i);
    parameter.numel = numels[i];
    parameter.number = static_cast<std::int64_t>(i);
    parameter.group = options[i] < 0 ? FlatParameter::kNoGroup : static_cast<std::size_t>(options[i]);
  }
  read_matrices(from, optimizer.type, flat);
  return flat;
}

}  // namespace

nlohmann::json describe_group(const FlatGroup& group) {
  Sizes numels, options;
  for (const FlatParameter& parameter : group.parameters) {
    numels.push_back(parameter.numel);
    options.push_back(parameter.group == FlatParameter::kNoGroup ? -1 : static_cast<std::int64_t>(parameter.group));
  }
  TORCH_INTERNAL_ASSERT(Layout::pack(numels, group.layout.parts()).numel() == group.layout.numel(),
                        "a server would lay out unit ", group.unit->name, " in another way");
  nlohmann::json described = {{"unit", group.unit->name}, {"unit_index", group.unit->index}, {"group", group.index},
                              {"numels", numels},         {"parts", group.layout.parts()},   {"options", options}};
  if (group.matrices.empty()) return described;
  for (const char* const key : {"matrices", "sizes", "strides"}) described[key] = nlohmann::json::array();
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    described["matrices"].push_back({group.matrices[i].rows, group.matrices[i].columns});
    described["sizes"].push_back(group.parameters[i].sizes);
    described["strides"].push_back(group.parameters[i].strides);
  }
  return described;
}

absl::StatusOr<ServedDefinition> read_definition(const std::string& text) {
  const nlohmann::json all = nlohmann::json::parse(text);
  ServedDefinition made;
  made.limit = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * all.at("timeout_s").get<double>()));
  TESSERA_ASSIGN_OR_RETURN(made.strategy, parse_strategy(all.at("strategy"), "a worker's strategy"));
  const OptimizerConfig& optimizer = made.strategy.optimizer;
  made.server = all.at("server");
  made.servers = all.at("servers");
  made.ranks = all.at("ranks");
  expect_defined(made.ranks >= 1 && made.servers >= 1 && made.server >= 0 && made.server < made.servers,
                 "numbers of servers");
  const auto pieces = static_cast<int>(made.strategy.sync.asynchronous.replica_ranks);
  std::vector<ServedCut::Group> sizes;
  for (const nlohmann::json& each : all.at("groups")) {
    const FlatGroup group = read_group(each, optimizer);
    expect_defined(group.layout.parts() % pieces == 0, "ranks of a replica");
    sizes.push_back({group.layout.numel(), is_served_whole(optimizer.type, !group.matrices.empty())});
    for (int piece = 0; piece < pieces; ++piece) {
      made.units.push_back(std::make_unique<Unit>(each.at("unit_index").get<int>(), each.at("unit")));
      FlatGroup& flat = *made.units.back()->groups.emplace_back(std::make_unique<FlatGroup>(group));
      flat.unit = made.units.back().get();
    }
  }
  const ServedCut cut(sizes, made.servers, pieces);
  for (std::size_t i = 0; i < made.units.size(); ++i) {
    FlatGroup& flat = *made.units[i]->groups[0];
    const std::size_t group = i / static_cast<std::size_t>(pieces);
    flat.optimizer_part = cut.shard(group, made.server, static_cast<int>(i % static_cast<std::size_t>(pieces)));
    flat.parameter_part = flat.gradient_part = flat.optimizer_part;
  }
  if (!made.units.empty()) {
    const int parts = made.units[0]->groups[0]->layout.parts();
    add_tensor_states(made.units, make_tensor_rule(optimizer, OwnRules{}).get(), parts);
  }
  return made;
}

}  // namespace tessera
