#include "engine/checkpoint/saved_frozen.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "checkpoint/commit.h"
#include "engine/checkpoint/state_formats.h"
#include "runtime/base/state_dtype.h"
#include "runtime/base/status.h"
#include "sharding/scalar_type.h"
#include "tessera/strategy.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kTable = "table";
constexpr std::int64_t kConvertedAtOnce = std::int64_t{1} << 16;  ///< number of elements that are converted at once

using Bytes = std::shared_ptr<const std::vector<std::byte>>;
Bytes data_of(const FrozenState& state) { return {state.own, &state.own->data}; }
Bytes scales_of(const FrozenState& state) { return {state.own, &state.own->scales}; }

SavedState described(const FrozenState& state) { return {state.name, name_of(state.dtype)}; }

std::optional<StateDType> dtype_named(const std::string& format) {
  for (const StateDType dtype : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    if (name_of(dtype) == format) return dtype;
  }
  return std::nullopt;
}

/// Fills `share.own` with the elements `own` of the state `saved`, converted to the format of `share`.
absl::Status read_share(SavedCheckpoint& checkpoint, const SavedState& saved, const std::string& parameter, Extent own,
                        FrozenState& share) {
  JoinedState values;
  const StateBytes size = state_bytes(share.dtype, own.numel);
  values.data.resize(static_cast<std::size_t>(size.data));
  values.scales.resize(static_cast<std::size_t>(size.scales));
  const std::string format = name_of(share.dtype);
  if (saved.format == format) {
    TESSERA_RETURN_IF_ERROR(checkpoint.read(saved.name, parameter, own.offset, values.data));
  } else {
    const std::int64_t from = element_bytes(dtype_of_state(saved)), to = element_bytes(dtype_of_state({"", format}));
    for (std::int64_t done = 0; done < own.numel; done += kConvertedAtOnce) {
      const std::int64_t count = std::min(kConvertedAtOnce, own.numel - done);
      TESSERA_ASSIGN_OR_RETURN(
          const std::span<const std::byte> bytes,
          checkpoint.view(saved.name, parameter, own.offset + done, static_cast<std::size_t>(count * from)));
      convert_state(
          saved.format, bytes, format,
          std::span(values.data).subspan(static_cast<std::size_t>(done * to), static_cast<std::size_t>(count * to)));
    }
  }
  if (size.scales > 0)
    TESSERA_RETURN_IF_ERROR(checkpoint.read(saved.name + kScales, parameter, own.offset / kStateBlock, values.scales));
  share.own = std::make_shared<JoinedState>(std::move(values));
  return absl::OkStatus();
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> bytes_of_text(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string part_name(std::int64_t number, std::size_t state) {
  return std::to_string(number) + "." + std::to_string(state);
}

json table_row(const FrozenState& state) {
  json row = {{"name", state.name}, {"format", name_of(state.dtype)}, {"numel", state.numel}};
  if (state.sizes) row["sizes"] = *state.sizes;
  return row;
}

/// Returns the state that a row of the table describes, with the bytes of the part `name`; nothing if the format is
/// unknown.
std::optional<FrozenState> state_of_row(const json& row, CommitParts& parts, const std::string& name) {
  FrozenState state;
  state.name = row.at("name").get<std::string>();
  const std::optional<StateDType> dtype = dtype_named(row.at("format").get<std::string>());
  if (!dtype) return std::nullopt;
  state.dtype = *dtype;
  state.numel = row.at("numel").get<std::int64_t>();
  if (row.contains("sizes")) state.sizes = row.at("sizes").get<std::vector<std::int64_t>>();
  state.own =
      std::make_shared<JoinedState>(JoinedState{bytes_of_text(parts[name]), bytes_of_text(parts[name + kScales])});
  return state;
}

}  // namespace

void describe_frozen(const FrozenParameter& kept, SavedParameter& saved, std::vector<SavedState>& states) {
  saved.updates = kept.updates;
  saved.keeps_master = kept.master.has_value();
  if (kept.states.empty()) return;
  saved.states.emplace();
  for (const FrozenState& state : kept.states) {
    saved.states->push_back(state.name);
    if (state.sizes) saved.state_shapes[state.name] = *state.sizes;
    if (std::ranges::find(states, state.name, &SavedState::name) == states.end()) states.push_back(described(state));
  }
}

void add_frozen(const FrozenStates& frozen, const std::vector<std::unique_ptr<Unit>>& units, int rank, int ranks,
                StateWriter& writer) {
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const FrozenParameter* const kept = frozen.find(group.parameters[i].tensor);
    if (!kept) return;
    const std::string& name = group.parameters[i].name;
    const auto first = [&](const FrozenState& state) {
      return FrozenStates::share_of(state.numel, rank, ranks).offset;
    };
    for (const FrozenState& state : kept->states) {
      writer.add(state.name, name, dtype_of_state(described(state)), first(state), data_of(state));
      writer.add(state.name + kScales, name, "F32", first(state) / kStateBlock, scales_of(state));
    }
    if (kept->master) writer.add(kMaster, name, "F32", first(*kept->master), data_of(*kept->master));
  });
}

std::optional<StateDType> kept_format(const SavedState& state, const SavedParameter& saved,
                                      const StoredStates& stored) {
  const bool is_of_tensor = saved.state_shapes.contains(state.name);
  if (is_of_tensor) return stored.has_tensor_states() ? std::optional(StateDType::kF32) : std::nullopt;
  const auto known = std::ranges::find(stored.all(), state.name, &SavedState::name);
  return known == stored.all().end() ? std::nullopt : dtype_named(known->format);
}

absl::StatusOr<FrozenParameter> read_frozen(SavedCheckpoint& checkpoint, const SavedParameter& saved,
                                            const FlatGroup& group, const StoredStates& stored, int rank, int ranks) {
  FrozenParameter kept;
  kept.updates = saved.updates;
  const auto own = [&](std::int64_t numel) { return FrozenStates::share_of(numel, rank, ranks); };
  for (const SavedState& state : checkpoint.manifest().states) {
    const std::optional<StateDType> dtype = kept_format(state, saved, stored);
    if (saved.updates == 0 || !saved.has_state(state.name) || !dtype) continue;  // a state without updates holds zeros
    FrozenState share{state.name, *dtype, saved.numel_of(state.name), std::nullopt, nullptr};
    const auto shape = saved.state_shapes.find(state.name);
    if (shape != saved.state_shapes.end()) share.sizes = shape->second;
    TESSERA_RETURN_IF_ERROR(read_share(checkpoint, state, saved.name, own(share.numel), share));
    kept.states.push_back(std::move(share));
  }
  if (!saved.has_master() || !is_trainable(group.dtype) || group.dtype == DType::kF32) return kept;
  FrozenState master;
  master.numel = saved.numel;
  TESSERA_RETURN_IF_ERROR(read_share(checkpoint, {kMaster, "fp32"}, saved.name, own(master.numel), master));
  kept.master = std::move(master);
  return kept;
}

std::string write_frozen(const FrozenStates& frozen, const std::vector<std::unique_ptr<Unit>>& units) {
  if (frozen.empty()) return "";
  CommitParts parts;
  json table = json::array();
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    const FrozenParameter* const kept = frozen.find(parameter.tensor);
    if (!kept) return;
    json row = {{"number", parameter.number}, {"updates", kept->updates}, {"states", json::array()}};
    std::size_t next = 0;
    const auto add = [&](const FrozenState& state) {
      const std::string name = part_name(parameter.number, next++);
      parts[name] = text_of(state.own->data);
      parts[name + kScales] = text_of(state.own->scales);
      return table_row(state);
    };
    for (const FrozenState& state : kept->states) row["states"].push_back(add(state));
    if (kept->master) row["master"] = add(*kept->master);
    table.push_back(std::move(row));
  });
  parts[kTable] = table.dump();
  return write_parts(parts);
}

bool read_frozen(std::string_view bytes, const std::vector<std::unique_ptr<Unit>>& units, FrozenStates& frozen) {
  std::map<std::int64_t, at::Tensor> by_number;
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    by_number[group.parameters[i].number] = group.parameters[i].tensor;
  });
  CommitParts parts;
  if (!read_parts(bytes, parts)) return false;
  for (const json& row : json::parse(parts[kTable])) {
    const auto number = row.at("number").get<std::int64_t>();
    if (!by_number.contains(number)) return false;
    FrozenParameter kept;
    kept.updates = row.at("updates").get<std::int64_t>();
    std::size_t next = 0;
    for (const json& each : row.at("states")) {
      auto state = state_of_row(each, parts, part_name(number, next++));
      if (!state) return false;
      kept.states.push_back(*std::move(state));
    }
    if (row.contains("master")) {
      kept.master = state_of_row(row.at("master"), parts, part_name(number, next));
      if (!kept.master) return false;
    }
    frozen.put(by_number.at(number), std::move(kept));
  }
  return true;
}

}  // namespace tessera
