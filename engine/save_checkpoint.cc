#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/hash.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/generators.h"
#include "engine/checkpoint/matched_checkpoint.h"
#include "engine/checkpoint/state_writer.h"
#include "engine/checkpoint/stored_states.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/engine_checkpoints.h"
#include "engine/expect.h"
#include "engine/outcomes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

using Buffers = std::vector<std::pair<std::string, at::Tensor>>;  ///< by name, in host memory

Buffers buffers_of(const torch::nn::Module& module) {
  Buffers buffers;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) buffers.emplace_back(item.key(), host_copy(item.value()));
  }
  return buffers;
}

/// A hash for each buffer, one behind the other.
std::string hashes_of(const Buffers& buffers) {
  std::string text;
  for (const auto& [name, buffer] : buffers) text += hash_text(checkpoint_hash(bytes_of(buffer)));
  return text;
}

/// What one rank knows of a save before anything is written.
struct Start {
  std::string path;    ///< rank 0's: of the new checkpoint's folder
  std::string hashes;  ///< of the buffers
};

std::string encode(const Start& start) { return nlohmann::json{start.path, start.hashes}.dump(); }

Start decode(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  return {json.at(0).get<std::string>(), json.at(1).get<std::string>()};
}

/// Writes one checkpoint. Every rank makes one, and all do the same steps.
class Save {
 public:
  Save(EngineCheckpoints::State& s, const std::string& folder, const CheckpointItems& items, const SaveOptions& options)
      : s_(s),
        folder_(folder),
        items_(items),
        options_(options),
        rank_(s.mesh.rank()),
        who_("rank " + std::to_string(rank_)),
        states_(s.strategy, s.own_rule) {}

  /// The new checkpoint's path, or the failure that all ranks share.
  absl::StatusOr<std::string> run() {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> starts,
                             share("checkpoint begins", [&] { return begin(); }));
    for (const std::string& start : starts) starts_.push_back(decode(start));
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                             share("checkpoint written", [&] { return write(); }));
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                             share("checkpoint committed", [&] { return commit(files); }));
    return paths[0];
  }

 private:
  template <class Body>
  absl::StatusOr<std::vector<std::string>> share(const char* label, const Body& body) {
    return share_outcomes(*s_.axes.control, label, body);
  }

  absl::StatusOr<std::string> begin() {
    progress_ = s_.step->progress();
    buffers_ = buffers_of(*s_.module);
    Start start{"", hashes_of(buffers_)};
    if (rank_ == 0) {
      TESSERA_RETURN_IF_ERROR(copy_items());
      const std::string folder = std::filesystem::absolute(folder_).string();
      TESSERA_ASSIGN_OR_RETURN(unfinished_, UnfinishedCheckpoint::begin(folder, s_.attempts, who_));
      start.path = unfinished_->path();
    }
    return encode(start);
  }

  absl::Status copy_items() {
    for (const auto& [name, text] : items_.json) {
      if (!nlohmann::json::accept(text))
        return make_error(ExitCode::kUsage, "save_checkpoint: the item \"" + name + "\" is no JSON text");
    }
    for (const auto& [name, tensor] : items_.tensors) {
      if (!tensor.defined())
        return make_error(ExitCode::kUsage, "save_checkpoint: the item \"" + name + "\" is an undefined tensor");
      safetensors_word(tensor.scalar_type(), "item \"" + name + "\"");
      host_items_.emplace_back(name, host_copy(tensor));
    }
    return absl::OkStatus();
  }

  /// Ranks whose buffer `i` is not rank 0's.
  std::vector<std::int64_t> ranks_with_own(std::size_t i) const {
    constexpr std::size_t kDigits = 16;
    std::vector<std::int64_t> ranks;
    const auto hash = [&](const Start& start) { return start.hashes.substr(i * kDigits, kDigits); };
    for (std::size_t rank = 1; rank < starts_.size(); ++rank) {
      if (hash(starts_[rank]) != hash(starts_[0])) ranks.push_back(static_cast<std::int64_t>(rank));
    }
    return ranks;
  }

  /// The file of this rank, as a manifest of one file.
  absl::StatusOr<std::string> write() {
    StateWriter writer(s_.units, s_.plan, states_);
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const auto& [name, buffer] = buffers_[i];
      const std::vector<std::int64_t> own = ranks_with_own(i);
      if (rank_ == 0) writer.add(kBuffer, name, buffer);
      if (std::ranges::find(own, rank_) != own.end()) writer.add(buffer_of_rank(rank_), name, buffer);
    }
    for (const auto& [name, item] : host_items_) writer.add(kItem, name, item);
    writer.add(kGenerator, std::to_string(rank_), state_of_generator(c10::Device(c10::kCPU)));
    const ComputeDevice& device = s_.accelerator.device;
    if (device.is_queued) writer.add(kGpuGenerator, std::to_string(rank_), state_of_generator(device.device));
    const std::string number = std::to_string(rank_), zeros(5 - std::min<std::size_t>(5, number.size()), '0');
    TESSERA_ASSIGN_OR_RETURN(SavedFile file,
                             writer.write(starts_[0].path, "rank-" + zeros + number + ".safetensors", who_));
    Manifest manifest;
    manifest.files.push_back(std::move(file));
    return write_manifest(manifest);
  }

  absl::StatusOr<std::string> commit(const std::vector<std::string>& files) {
    if (rank_ != 0) return "";
    Manifest manifest = describe();
    for (const std::string& text : files) {
      TESSERA_ASSIGN_OR_RETURN(Manifest one, read_manifest(who_, text));
      manifest.files.push_back(std::move(one.files[0]));
    }
    TESSERA_ASSIGN_OR_RETURN(std::string path, unfinished_->commit(write_manifest(manifest)));
    if (options_.keep > 0) {
      // Old checkpoints that stay are no reason to lose a new one.
      const absl::Status pruned = unfinished_->prune(options_.keep);
      if (!pruned.ok()) log_warning("an old checkpoint could not be removed: " + message_of(pruned));
    }
    return path;
  }

  Manifest describe() const {
    const MeshPosition& mesh = s_.plan.input().mesh;
    const StepProgress& progress = progress_;
    Manifest manifest;
    manifest.step = s_.attempts;
    manifest.steps_applied = progress.applied;
    manifest.ranks = manifest.generators = s_.mesh.world_size();
    manifest.replicate = mesh.replicate_size;
    manifest.shard = mesh.shard_size;
    manifest.strategy = s_.strategy.to_json();
    manifest.states = states_.all();
    for (const auto& unit : s_.units) manifest.units.push_back(unit->name);
    if (s_.strategy.mixed_precision.param == DType::kF16)
      manifest.loss_scale =
          SavedLossScale{progress.scaler.scale, progress.scaler.finite_steps, progress.scaler.overflow_steps};
    if (s_.strategy.lr_schedule.type == LrScheduleType::kManual) {
      for (const double rate : progress.rates) {
        const bool has_own = rate == rate;
        manifest.rates.push_back(has_own ? std::optional(rate) : std::nullopt);
      }
    }
    manifest.parameters = describe_parameters(progress);
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      manifest.buffers.push_back(describe_tensor(buffers_[i].first, buffers_[i].second));
      manifest.buffers.back().ranks = ranks_with_own(i);
    }
    for (const auto& [name, item] : host_items_) manifest.items.push_back(describe_tensor(name, item));
    manifest.json_items = items_.json;
    manifest.data = items_.data;
    return manifest;
  }

  static SavedTensor describe_tensor(const std::string& name, const at::Tensor& tensor) {
    return {name, safetensors_word(tensor.scalar_type(), name), tensor.sizes().vec(), {}, tensor.numel()};
  }

  /// In order of registration, which does not depend on units.
  std::vector<SavedParameter> describe_parameters(const StepProgress& progress) const {
    std::vector<std::pair<std::int64_t, SavedParameter>> numbered;
    for_each_parameter(s_.units, [&](const FlatGroup& group, std::size_t i) {
      const FlatParameter& parameter = group.parameters[i];
      SavedParameter saved;
      saved.name = parameter.name;
      saved.aliases = parameter.aliases;
      saved.shape = parameter.sizes;
      saved.strides = saved_strides(parameter);
      saved.dtype = safetensors_word(group.dtype);
      saved.trains = group.trainable;
      if (group.trainable) saved.states = states_.names_of(group);
      const auto updates = progress.updates.find(parameter.tensor.unsafeGetTensorImpl());
      if (updates != progress.updates.end()) saved.updates = updates->second;
      saved.unit = group.unit->index;
      saved.group = static_cast<std::int64_t>(group.index);
      saved.first_element = group.layout.extent(i).offset;
      numbered.emplace_back(parameter.number, std::move(saved));
    });
    std::ranges::sort(numbered, {}, &std::pair<std::int64_t, SavedParameter>::first);
    std::vector<SavedParameter> parameters;
    for (auto& [number, parameter] : numbered) parameters.push_back(std::move(parameter));
    return parameters;
  }

  EngineCheckpoints::State& s_;
  const std::string& folder_;
  const CheckpointItems& items_;
  const SaveOptions& options_;
  const int rank_;
  const std::string who_;
  const StoredStates states_;
  StepProgress progress_;
  Buffers buffers_, host_items_;
  std::unique_ptr<UnfinishedCheckpoint> unfinished_;  ///< rank 0's
  std::vector<Start> starts_;                         ///< by rank
};

}  // namespace

std::string EngineCheckpoints::save(const std::string& folder, const CheckpointItems& items,
                                    const SaveOptions& options) {
  expect(s_.microbatch == 0, "save_checkpoint between backward and step: call step() or zero_grad() first");
  s_.expect_weights("save_checkpoint");
  expect(s_.open_guards == 0, "save_checkpoint under a Gathered guard: close that guard first");
  expect(!s_.half_loaded, "save_checkpoint after load_checkpoint failed half-way: the values are of no one step");
  expect(options.keep >= 0, "save_checkpoint: SaveOptions::keep is 0 (all) or a number of checkpoints, got ",
         options.keep);
  return value_or_throw(s_.or_abort("save_checkpoint", [&] {
    s_.expect_parameters();
    return Save(s_, folder, items, options).run();
  }));
}

std::string save_checkpoint(Engine& engine, const std::filesystem::path& folder, const CheckpointItems& items,
                            const SaveOptions& options) {
  return EngineCheckpoints(engine).save(folder.string(), items, options);
}

}  // namespace tessera
