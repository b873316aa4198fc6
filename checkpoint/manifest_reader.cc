#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/hash.h"
#include "checkpoint/files/json_fields.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest_line.h"
#include "checkpoint/shard_header.h"
#include "runtime/base/hint.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kMostManifestValues = std::size_t{1} << 24;
constexpr std::int64_t kMost = std::int64_t{1} << 53;
constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
constexpr std::string_view kLineBegin = "{\"tessera_checkpoint\": ", kLineMiddle = ", \"xxh3_64_of_what_follows\": \"",
                           kLineEnd = "\",\n";

absl::Status corrupt_manifest(const std::string& file, const std::string& what) {
  return make_error(ExitCode::kCorruptData, file + ": " + what + (has_hint(what) ? "" : kDamagedCheckpointHint));
}

/// Multiplies sizes. Returns false if the product is larger than any file can be.
bool multiply(const std::vector<std::int64_t>& shape, std::int64_t& numel) {
  numel = 1;
  for (const std::int64_t size : shape) {
    if (size != 0 && numel > kMost / size) return false;
    numel *= size;
  }
  return true;
}

/// Reads a manifest from JSON that may be damaged or hostile.
///
/// Each list of the manifest has a reader of one element (`read_state`, `read_parameter`, ...), which `for_each` calls.
/// If a required field is missing, or a field has another type or is out of range, the result is a default, and
/// `problem_` is set. The first problem is kept, and `read` returns it at the end. Then names are compared: no name may
/// occur twice, and parameters may name only known states.
class ManifestReader {
 public:
  ManifestReader(const JsonNode& root, const std::string& file) : file_(file), root_(root, file, "", problem_) {}

  absl::StatusOr<Manifest> read() {
    Manifest manifest;
    manifest.written_by = root_.text("written_by");
    manifest.step = root_.integer("step", 0, kMost);
    manifest.progress.steps_applied = root_.integer("steps_applied", 0, kMost);
    manifest.ranks = root_.integer("ranks", 1, kMostRanks);
    read_mesh(manifest);
    manifest.generators = root_.integer("generators", 0, manifest.ranks);
    read_progress(manifest);
    manifest.units = root_.texts("units");
    manifest.strategy = root_.text("strategy");
    for_each("states", [&](const JsonFields& fields) { manifest.states.push_back(read_state(fields)); });
    for_each("parameters", [&](const JsonFields& fields) { manifest.parameters.push_back(read_parameter(fields)); });
    for_each("buffers",
             [&](const JsonFields& fields) { manifest.buffers.push_back(read_tensor(fields, manifest.ranks)); });
    for_each("items", [&](const JsonFields& fields) { manifest.items.push_back(read_tensor(fields, 0)); });
    for_each("files", [&](const JsonFields& fields) { manifest.files.push_back(read_file(fields)); });
    for (const JsonNode& item : root_.children("json_items")) {
      if (!item.value.is_string())
        root_.refuse("json_items", "wanted strings");
      else
        manifest.json_items[item.key] = item.value.get<std::string>();
    }
    expect_unique("states", manifest.states);
    expect_unique("parameters", manifest.parameters);
    expect_unique("buffers", manifest.buffers);
    expect_unique("items", manifest.items);
    expect_unique("files", manifest.files);
    for (const SavedParameter& parameter : manifest.parameters) expect_known_states(parameter, manifest.states);
    TESSERA_RETURN_IF_ERROR(problem_);
    return manifest;
  }

 private:
  template <class Read>
  void for_each(const char* key, const Read& read) {
    std::size_t i = 0;
    for (const JsonNode& node : root_.children(key)) {
      if (!problem_.ok()) return;
      read(JsonFields(node, file_, json_pointer(root_.place_of(key), std::to_string(i++)), problem_));
    }
  }

  template <class List>
  void expect_unique(const char* key, const List& list) {
    std::set<std::string_view> names;
    for (const auto& value : list) {
      if (names.insert(value.name).second) continue;
      if (problem_.ok())
        problem_ = corrupt_manifest(file_, fmt::format("/{}: {} is given twice", key, quoted_text(value.name)));
    }
  }

  void expect_known_states(const SavedParameter& parameter, const std::vector<SavedState>& states) {
    std::vector<std::string> names = parameter.states.value_or(std::vector<std::string>());
    for (const auto& [name, shape] : parameter.state_shapes) names.push_back(name);
    for (const std::string& name : names) {
      const bool is_known = std::ranges::find(states, name, &SavedState::name) != states.end();
      if (is_known || !problem_.ok()) continue;
      problem_ = corrupt_manifest(file_, fmt::format("/parameters: {} has the state {}, which is not among \"states\"",
                                                     quoted_text(parameter.name), quoted_text(name)));
    }
  }

  void read_mesh(Manifest& manifest) {
    const JsonNode* const node = root_.find("mesh");
    if (!node) return root_.refuse("mesh", "wanted an object");
    const JsonFields fields(*node, file_, "/mesh", problem_);
    manifest.replicate = fields.integer("replicate", 1, kMostRanks);
    manifest.shard = fields.integer("shard", 1, kMostRanks);
    if (manifest.replicate * manifest.shard != manifest.ranks)
      root_.refuse("mesh", fmt::format("wanted as many ranks as the {} of the run", manifest.ranks));
  }

  void read_options(const JsonNode& node, std::map<std::string, double>& options) {
    if (!node.is_object()) return root_.refuse("options", "wanted objects of numbers");
    for (const JsonNode& number : node.children) {
      if (!number.value.is_number()) return root_.refuse("options", "wanted objects of numbers");
      options[number.key] = number.value.get<double>();
    }
  }

  void read_progress(Manifest& manifest) {
    SavedProgress& progress = manifest.progress;
    progress.samples_seen = root_.has("samples_seen") ? root_.integer("samples_seen", 0, kMost) : 0;
    manifest.noise_version = root_.has("noise") ? root_.integer("noise", 1, kMost) : 1;
    manifest.defaults_version = root_.has("defaults") ? root_.integer("defaults", 1, kMost) : 1;
    if (const JsonNode* node = root_.find("loss_scale")) {
      const JsonFields fields(*node, file_, "/loss_scale", problem_);
      SavedLossScale& scale = progress.loss_scale.emplace();
      scale.scale = fields.number("scale");
      scale.finite_steps = fields.integer("finite_steps", 0, kMost);
      scale.overflow_steps = fields.integer("overflow_steps", 0, kMost);
      if (!(scale.scale > 0)) fields.refuse("scale", "wanted a number above 0");
    }
    if (root_.has("rates")) {
      for (const JsonNode& rate : root_.children("rates")) {
        const bool is_rate = rate.value.is_null() || (rate.value.is_number() && rate.value.get<double>() >= 0);
        if (!is_rate)
          root_.refuse("rates", "wanted rates that are null or 0 and more");
        else if (rate.value.is_null())
          progress.rates.emplace_back();
        else
          progress.rates.emplace_back(rate.value.get<double>());
      }
    }
    if (root_.has("options")) {
      for (const JsonNode& options : root_.children("options")) read_options(options, progress.options.emplace_back());
    }
    if (const JsonNode* node = root_.find("losses")) {
      const JsonFields fields(*node, file_, "/losses", problem_);
      SavedLosses& losses = progress.losses.emplace();
      losses.spikes_in_a_row = fields.integer("spikes_in_a_row", 0, kMost);
      for (const JsonNode& loss : fields.children("window")) {
        if (loss.value.is_number() && loss.value.get<double>() >= 0)
          losses.window.push_back(loss.value.get<double>());
        else
          fields.refuse("window", "wanted losses of 0 and more");
      }
      if (losses.window.size() > SavedLosses::kMost)
        fields.refuse("window", fmt::format("wanted at most {} losses", SavedLosses::kMost));
    }
    if (const JsonNode* node = root_.find("noise_scale")) {
      const JsonFields fields(*node, file_, "/noise_scale", problem_);
      SavedNoiseScale& noise = progress.noise_scale.emplace();
      noise = {fields.number("square"), fields.number("variance"), fields.number("weight"), fields.number("batch")};
      if (!(noise.weight >= 0 && noise.weight <= 1)) fields.refuse("weight", "wanted a number from 0 to 1");
      if (!(noise.batch >= 0)) fields.refuse("batch", "wanted a number of 0 or more");
    }
    if (const JsonNode* node = root_.find("residuals")) {
      const JsonFields fields(*node, file_, "/residuals", problem_);
      SavedResiduals& residuals = manifest.residuals.emplace();
      residuals.microbatches = fields.integer("microbatches", 1, kMost);
      if (fields.has("momentum")) residuals.momentum = fields.number("momentum");
      if (!(residuals.momentum >= 0 && residuals.momentum < 1)) fields.refuse("momentum", "wanted 0 to below 1");
    }
    if (const JsonNode* node = root_.find("processor")) {
      const JsonFields fields(*node, file_, "/processor", problem_);
      SavedProcessor& processor = manifest.processor.emplace();
      processor.threads = fields.integer("threads", 0, kMost);
      processor.libtorch = fields.text("libtorch");
      processor.tessera = fields.text("tessera");
      if (fields.has("gpu")) processor.gpu = fields.text("gpu");
    }
    if (const JsonNode* node = root_.find("data")) {
      const JsonFields fields(*node, file_, "/data", problem_);
      SamplerCursor& cursor = manifest.data.emplace();
      cursor.epoch = fields.integer("epoch", 0, kMost);
      cursor.consumed = fields.integer("consumed", 0, std::int64_t{1} << 61);
      cursor.num_samples = fields.integer("num_samples", 0, std::int64_t{1} << 60);
      cursor.shuffle = fields.boolean("shuffle");
      const JsonNode* const seed = fields.find("seed");
      if (seed && seed->value.is_number_unsigned())
        cursor.seed = seed->value.get<std::uint64_t>();
      else
        fields.refuse("seed", "wanted an integer of 0 and more");
    }
  }

  static SavedState read_state(const JsonFields& fields) {
    SavedState state{fields.text("name"), fields.text("format")};
    const bool known = state.format == "fp32" || state.format == "bf16" || state.format == "8bit";
    if (!known) fields.refuse("format", "wanted \"fp32\", \"bf16\" or \"8bit\"");
    if (state.name.empty() || state.name.find('|') != std::string::npos)
      fields.refuse("name", "wanted a name without '|'");
    return state;
  }

  SavedParameter read_parameter(const JsonFields& fields) {
    SavedParameter parameter;
    parameter.name = fields.text("name");
    if (fields.has("aliases")) parameter.aliases = fields.texts("aliases");
    parameter.shape = fields.integers("shape", 0, kMost);
    if (fields.has("states")) parameter.states = fields.texts("states");
    if (const JsonNode* const node = fields.find("state_shapes")) {
      const JsonFields shapes(*node, file_, fields.place_of("state_shapes"), problem_);
      if (!node->is_object()) fields.refuse("state_shapes", "wanted an object");
      for (const JsonNode& shape : node->children) {
        std::int64_t numel = 0;
        const std::vector<std::int64_t> sizes = shapes.integers(shape.key, 0, kMost);
        if (!multiply(sizes, numel)) shapes.refuse(shape.key, "the sizes are too large");
        parameter.state_shapes[shape.key] = sizes;
      }
    }
    if (fields.has("strides")) parameter.strides = fields.integers("strides", 0, kMost);
    parameter.dtype = fields.text("dtype");
    parameter.trains = fields.boolean("trains");
    if (fields.has("keeps_master")) parameter.keeps_master = fields.boolean("keeps_master");
    parameter.updates = fields.integer("updates", 0, kMost);
    parameter.unit = fields.integer("unit", 0, kMost);
    parameter.group = fields.integer("group", 0, kMost);
    parameter.first_element = fields.integer("first_element", 0, kMost);
    if (!multiply(parameter.shape, parameter.numel)) fields.refuse("shape", "the sizes are too large");
    return parameter;
  }

  static SavedTensor read_tensor(const JsonFields& fields, std::int64_t ranks) {
    SavedTensor tensor;
    tensor.name = fields.text("name");
    tensor.dtype = fields.text("dtype");
    tensor.shape = fields.integers("shape", 0, kMost);
    if (fields.has("ranks")) tensor.ranks = fields.integers("ranks", 1, ranks - 1);
    if (element_bytes(tensor.dtype) == 0) fields.refuse("dtype", "wanted a type of safetensors");
    if (!multiply(tensor.shape, tensor.numel)) fields.refuse("shape", "the sizes are too large");
    return tensor;
  }

  static SavedFile read_file(const JsonFields& fields) {
    SavedFile file;
    file.name = fields.text("name");
    file.header_bytes = fields.integer("header_bytes", 8, ShardHeader::kMostBytes + 64);
    file.bytes = fields.integer("bytes", file.header_bytes, kMost);
    file.header_hash = fields.hash("header_hash");
    fields.integer("chunk_bytes", SavedFile::kChunkBytes, SavedFile::kChunkBytes);
    file.chunk_hashes = fields.hashes("chunk_hashes");
    if (!is_plain_name(file.name)) fields.refuse("name", "wanted a plain file name");
    if (file.chunk_hashes.size() != static_cast<std::size_t>(file.chunks()))
      fields.refuse("chunk_hashes",
                    fmt::format("wanted {} hashes for {} bytes of data", file.chunks(), file.data_bytes()));
    return file;
  }

  const std::string& file_;
  absl::Status problem_;
  const JsonFields root_;
};

}  // namespace

std::string manifest_line(std::int64_t version, std::uint64_t hash) {
  return fmt::format("{}{}{}{}{}", kLineBegin, version, kLineMiddle, hash_text(hash), kLineEnd);
}

bool read_manifest_line(std::string_view line, std::int64_t& version, std::uint64_t& hash) {
  if (!line.starts_with(kLineBegin)) return false;
  const std::string_view digits = line.substr(kLineBegin.size());
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), version);
  if (error != std::errc()) return false;
  const std::string_view rest = digits.substr(static_cast<std::size_t>(end - digits.data()));
  if (rest.size() < kLineMiddle.size() + kLineEnd.size() || !rest.starts_with(kLineMiddle)) return false;
  if (!read_hash(rest.substr(kLineMiddle.size(), rest.size() - kLineMiddle.size() - kLineEnd.size()), hash))
    return false;
  return line == manifest_line(version, hash);
}

bool is_plain_name(std::string_view name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  return !name.empty() && name.size() <= 255 && name[0] != '.' && std::ranges::all_of(name, is_plain);
}

absl::StatusOr<Manifest> read_manifest(const std::string& file, std::string_view text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  const std::string_view lines = text.substr(std::min(end + 1, text.size()));
  std::int64_t version = 0;
  std::uint64_t hash = 0;
  if (!read_manifest_line(text.substr(0, std::min(end + 1, text.size())), version, hash))
    return corrupt_manifest(
        file,
        "its first line is not that of a checkpoint's manifest. [T0075] hint: is this another program's file, or "
        "damaged? tessera checkpoint ls shows the checkpoints of a folder");
  if (version < 1 || version > Manifest::kVersion)
    return corrupt_manifest(file, fmt::format("it has version {} of the format, and this program reads versions 1 to "
                                              "{}. [T0076] hint: read it with the version of Tessera that wrote it",
                                              version, Manifest::kVersion));
  if (const std::uint64_t got = checkpoint_hash(lines); got != hash)
    return corrupt_manifest(
        file,
        fmt::format(
            "its text has the hash {}, wanted {}: it is damaged or cut short. [T0077] hint: take an earlier checkpoint",
            hash_text(got), hash_text(hash)));
  TESSERA_ASSIGN_OR_RETURN(const JsonNode root, parse_checkpoint_json(file, text, kMostManifestValues));
  return ManifestReader(root, file).read();
}

}  // namespace tessera
