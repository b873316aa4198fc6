#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/files/hash.h"
#include "checkpoint/manifest_line.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const SavedParameter& parameter) {
  Json json = {{"name", parameter.name},       {"shape", parameter.shape},
               {"dtype", parameter.dtype},     {"trains", parameter.trains},
               {"updates", parameter.updates}, {"unit", parameter.unit},
               {"group", parameter.group},     {"first_element", parameter.first_element}};
  if (!parameter.aliases.empty()) json["aliases"] = parameter.aliases;
  if (!parameter.strides.empty()) json["strides"] = parameter.strides;
  if (parameter.states) json["states"] = *parameter.states;
  if (!parameter.state_shapes.empty()) json["state_shapes"] = parameter.state_shapes;
  if (parameter.keeps_master) json["keeps_master"] = true;
  return json;
}

Json json_of(const SavedTensor& tensor) {
  Json json = {{"name", tensor.name}, {"dtype", tensor.dtype}, {"shape", tensor.shape}};
  if (!tensor.ranks.empty()) json["ranks"] = tensor.ranks;
  return json;
}

Json json_of(const SavedFile& file) {
  Json hashes = Json::array();
  for (const std::uint64_t hash : file.chunk_hashes) hashes.push_back(hash_text(hash));
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_hash", hash_text(file.header_hash)},
          {"chunk_bytes", SavedFile::kChunkBytes},
          {"chunk_hashes", std::move(hashes)}};
}

Json json_of(const SavedProcessor& processor) {
  Json json = {{"threads", processor.threads}, {"libtorch", processor.libtorch}, {"tessera", processor.tessera}};
  if (!processor.gpu.empty()) json["gpu"] = processor.gpu;
  return json;
}

Json json_of(const SavedState& state) { return {{"name", state.name}, {"format", state.format}}; }

template <class List>
Json list_of(const List& values) {
  Json list = Json::array();
  for (const auto& value : values) list.push_back(json_of(value));
  return list;
}

/// Writes each object of a list on a separate line, so that people can read and compare the objects.
std::string lines_of(const Json& root) {
  std::string text;
  for (const auto& [key, value] : root.items()) {
    text += (text.empty() ? "" : ",\n") + Json(key).dump() + ": ";
    const bool has_lines = value.is_array() && !value.empty() && value[0].is_object();
    if (!has_lines) {
      text += value.dump();
      continue;
    }
    for (std::size_t i = 0; i < value.size(); ++i) text += (i == 0 ? "[\n  " : ",\n  ") + value[i].dump();
    text += "\n]";
  }
  return text + "\n}\n";
}

}  // namespace

std::string to_json(const SavedProcessor& processor) { return json_of(processor).dump(); }

SavedProcessor read_processor(const std::string& text) {
  const Json json = Json::parse(text);
  if (json.is_array())  // a commit of an earlier version
    return {json.at(0).get<std::int64_t>(), json.at(1).get<std::string>(), json.at(2).get<std::string>(),
            json.at(3).get<std::string>()};
  return {json.at("threads").get<std::int64_t>(), json.at("libtorch").get<std::string>(),
          json.at("tessera").get<std::string>(), json.value("gpu", std::string())};
}

std::string this_program() { return "tessera " TESSERA_VERSION; }

bool SavedParameter::has_state(const std::string& state) const {
  return states ? std::ranges::find(*states, state) != states->end() : trains;
}

const std::vector<std::int64_t>& SavedParameter::shape_of(const std::string& state) const {
  const auto found = state_shapes.find(state);
  return found == state_shapes.end() ? shape : found->second;
}

std::int64_t SavedParameter::numel_of(const std::string& state) const {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape_of(state)) numel *= size;
  return numel;
}

std::int64_t Manifest::version() const {
  const bool has_frozen = std::ranges::any_of(parameters, [](const SavedParameter& parameter) {
    return !parameter.trains && (parameter.keeps_states() || parameter.keeps_master);
  });
  return has_frozen ? 2 : 1;
}

std::string write_manifest(const Manifest& manifest) {
  const SavedProgress& progress = manifest.progress;
  Json root = {{"written_by", manifest.written_by},
               {"step", manifest.step},
               {"steps_applied", progress.steps_applied},
               {"ranks", manifest.ranks},
               {"mesh", {{"replicate", manifest.replicate}, {"shard", manifest.shard}}},
               {"noise", manifest.noise_version},
               {"defaults", manifest.defaults_version},
               {"generators", manifest.generators}};
  if (progress.samples_seen > 0) root["samples_seen"] = progress.samples_seen;
  if (progress.loss_scale) {
    root["loss_scale"] = {{"scale", progress.loss_scale->scale},
                          {"finite_steps", progress.loss_scale->finite_steps},
                          {"overflow_steps", progress.loss_scale->overflow_steps}};
  }
  if (!progress.rates.empty()) {
    root["rates"] = Json::array();
    for (const std::optional<double>& rate : progress.rates) root["rates"].push_back(rate ? Json(*rate) : Json());
  }
  if (!progress.options.empty()) {
    root["options"] = Json::array();
    for (const std::map<std::string, double>& options : progress.options) root["options"].push_back(Json(options));
  }
  if (progress.losses)
    root["losses"] = {{"window", progress.losses->window}, {"spikes_in_a_row", progress.losses->spikes_in_a_row}};
  if (progress.noise_scale) {
    root["noise_scale"] = {{"square", progress.noise_scale->square},
                           {"variance", progress.noise_scale->variance},
                           {"weight", progress.noise_scale->weight},
                           {"batch", progress.noise_scale->batch}};
  }
  if (manifest.residuals) {
    root["residuals"] = {{"microbatches", manifest.residuals->microbatches}};
    if (manifest.residuals->momentum > 0) root["residuals"]["momentum"] = manifest.residuals->momentum;
  }
  if (manifest.processor) root["processor"] = json_of(*manifest.processor);
  if (manifest.data) {
    root["data"] = {{"epoch", manifest.data->epoch},
                    {"consumed", manifest.data->consumed},
                    {"num_samples", manifest.data->num_samples},
                    {"seed", manifest.data->seed},
                    {"shuffle", manifest.data->shuffle}};
  }
  root["states"] = list_of(manifest.states);
  root["units"] = manifest.units;
  root["parameters"] = list_of(manifest.parameters);
  root["buffers"] = list_of(manifest.buffers);
  root["items"] = list_of(manifest.items);
  root["json_items"] = manifest.json_items;
  root["files"] = list_of(manifest.files);
  root["strategy"] = manifest.strategy;
  const std::string lines = lines_of(root);
  return manifest_line(manifest.version(), checkpoint_hash(lines)) + lines;
}

}  // namespace tessera
