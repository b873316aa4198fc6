#include "engine/saving/checkpoint_save.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/files/hash.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/generators.h"
#include "engine/checkpoint/matched_checkpoint.h"
#include "engine/checkpoint/saved_frozen.h"
#include "engine/checkpoint/saved_residuals.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/job/outcomes.h"
#include "engine/job/processor.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_names.h"
#include "sharding/layout/written_part.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

// This file works as follows. `begin` fills the manifest (`describe_engine`), copies buffers and items to host memory,
// and makes the folder on rank 0. All ranks then get the folder's path and the hashes of every rank's buffers. A rank
// other than rank 0 writes only those buffers that differ from rank 0's. StateWriter collects the data that this rank
// writes. `hold` copies these data; `end` writes one file on each rank, and rank 0 commits the manifest that names all
// files.

using Buffers = CheckpointSave::Buffers;

Buffers buffers_of(const torch::nn::Module& module, const UnitsConfig& units) {
  Buffers buffers;
  for (const auto& item : whole_tensors(module, units))
    buffers.emplace_back(item.key(), host_copy(item.value().detach()));
  return buffers;
}

/// Returns the hashes of all buffers in one text.
std::string hashes_of(const Buffers& buffers) {
  std::string text;
  for (const auto& [name, buffer] : buffers) text += hash_text(checkpoint_hash(bytes_of(buffer)));
  return text;
}

/// The data that each rank tells the others about a save, before anything is written.
struct Start {
  std::string unfinished, path;  ///< rank 0 only: the new folder's path, before and after it is committed
  std::string hashes;            ///< hashes of the buffers
};

std::string encode(const Start& start) { return nlohmann::json{start.unfinished, start.path, start.hashes}.dump(); }

Start decode(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  return {json.at(0).get<std::string>(), json.at(1).get<std::string>(), json.at(2).get<std::string>()};
}

SavedTensor describe_tensor(const std::string& name, const at::Tensor& tensor) {
  return {name, safetensors_word(tensor.scalar_type(), name), tensor.sizes().vec(), {}, tensor.numel()};
}

/// Describes all parameters in the order of registration, which does not depend on units. `all` has the optimizer's
/// states; the function adds to it the states that only frozen parameters have.
std::vector<SavedParameter> describe_parameters(const Training& training, const StoredStates& states,
                                                const StepProgress& progress, std::vector<SavedState>& all) {
  std::vector<std::pair<std::int64_t, SavedParameter>> numbered;
  for_each_parameter(training.units, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    SavedParameter saved;
    saved.name = parameter.name;
    saved.aliases = parameter.aliases;
    saved.shape = parameter.sizes;
    saved.strides = saved_strides(parameter);
    saved.dtype = safetensors_word(group.dtype);
    saved.trains = group.trainable;
    if (group.trainable) {
      saved.states = states.names_of(group, i);
      for_each_tensor_state(group, i,
                            [&](const TensorState& state, Extent) { saved.state_shapes[state.name] = state.sizes; });
    }
    const auto updates = progress.updates.find(parameter.tensor.unsafeGetTensorImpl());
    if (updates != progress.updates.end()) saved.updates = updates->second;
    if (const FrozenParameter* const kept = training.frozen_states.find(parameter.tensor))
      describe_frozen(*kept, saved, all);
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

/// Makes the manifest, without buffers, items and files.
Manifest describe_engine(const Training& training, const StoredStates& states) {
  const Job& job = training.job;
  const Strategy& strategy = job.strategy;
  const StepProgress progress = training.step->progress();
  Manifest manifest;
  SavedProgress& saved = manifest.progress;
  manifest.step = training.times.attempts;
  saved.steps_applied = progress.applied;
  saved.samples_seen = progress.samples;
  manifest.ranks = manifest.generators = job.mesh.world_size();
  manifest.replicate = job.position.replicate_size;
  manifest.shard = job.position.shard_size;
  manifest.strategy = strategy.to_json();
  manifest.defaults_version = strategy.optimizer.defaults_version;
  manifest.states = states.all();
  for (const auto& unit : training.units) manifest.units.push_back(unit->name);
  if (strategy.mixed_precision.param == DType::kF16)
    saved.loss_scale =
        SavedLossScale{progress.scaler.scale, progress.scaler.finite_steps, progress.scaler.overflow_steps};
  if (strategy.lr_schedule.type == LrScheduleType::kManual) {
    for (const double rate : progress.rates) {
      const bool has_own = rate == rate;
      saved.rates.push_back(has_own ? std::optional(rate) : std::nullopt);
    }
  }
  saved.options = options_by_name(progress.options);
  if (strategy.on_spike.action != SpikeAction::kNone)
    saved.losses = SavedLosses{progress.losses.losses, progress.losses.spikes_in_a_row};
  if (strategy.noise_scale.every > 0)
    saved.noise_scale =
        SavedNoiseScale{progress.noise.square, progress.noise.variance, progress.noise.weight, progress.noise.batch};
  if (training.plan.sums().kept_gradient_numel > 0)
    manifest.residuals =
        SavedResiduals{training.plan.wire().accumulation, momentum_of_residuals(strategy.compression.method)};
  manifest.processor = processor_to_save(job);
  manifest.parameters = describe_parameters(training, states, progress, manifest.states);
  return manifest;
}

}  // namespace

void remove_old_checkpoints(const std::vector<std::string>& pruned) {
  const absl::Status removed = remove_pruned(pruned, "rank 0");
  if (!removed.ok()) log_warning("an old checkpoint could not be removed: " + message_of(removed));
}

CheckpointSave::CheckpointSave(Training& training, std::string folder, CheckpointItems items,
                               const SaveOptions& options)
    : training_(&training),
      folder_(std::move(folder)),
      items_(std::move(items)),
      options_(options),
      rank_(training.job.mesh.rank()),
      who_("rank " + std::to_string(rank_)),
      states_(training.job.strategy, training.job.own_rules, training.units) {}

absl::Status CheckpointSave::begin() {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                           share_outcomes(*training_->job.axes.control, "checkpoint begins", [&] { return note(); }));
  for (const std::string& text : texts) hashes_.push_back(decode(text).hashes);
  const Start first = decode(texts[0]);
  unfinished_path_ = first.unfinished;
  path_ = first.path;
  add_tensors();
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointSave::note() {
  manifest_ = describe_engine(*training_, states_);
  buffers_ = buffers_of(*training_->job.module, training_->job.strategy.units);
  writer_.emplace(training_->units, training_->plan, training_->job.position, states_);
  add_frozen(training_->frozen_states, training_->units, rank_, training_->job.mesh.world_size(), *writer_);
  Start start{"", "", hashes_of(buffers_)};
  if (rank_ == 0) {
    TESSERA_RETURN_IF_ERROR(copy_items());
    const std::string folder = std::filesystem::absolute(folder_).string();
    TESSERA_ASSIGN_OR_RETURN(unfinished_, UnfinishedCheckpoint::begin(folder, manifest_.step, who_));
    start.unfinished = unfinished_->path();
    start.path = unfinished_->committed_path();
  }
  return encode(start);
}

absl::Status CheckpointSave::copy_items() {
  for (const auto& [name, text] : items_.json) {
    if (!nlohmann::json::accept(text))
      return make_error(
          ExitCode::kUsage,
          "save_checkpoint: the item \"" + name +
              "\" is no JSON text. [T0095] hint: a text as a JSON library's dump writes it, so words stand in quotes");
  }
  for (const auto& [name, tensor] : items_.tensors) {
    if (!tensor.defined())
      return make_error(ExitCode::kUsage,
                        "save_checkpoint: the item \"" + name +
                            "\" is an undefined tensor. [T0096] hint: give it a value, or leave the item out");
    safetensors_word(tensor.scalar_type(), "item \"" + name + "\"");
    host_items_.emplace_back(name, host_copy(tensor));
  }
  return absl::OkStatus();
}

/// Returns the ranks whose buffer `i` differs from rank 0's buffer.
std::vector<std::int64_t> CheckpointSave::ranks_with_own(std::size_t i) const {
  constexpr std::size_t kDigits = 16;
  std::vector<std::int64_t> ranks;
  const auto hash = [&](std::size_t rank) { return hashes_[rank].substr(i * kDigits, kDigits); };
  for (std::size_t rank = 1; rank < hashes_.size(); ++rank) {
    if (hash(rank) != hash(0)) ranks.push_back(static_cast<std::int64_t>(rank));
  }
  return ranks;
}

/// Adds tensors to the manifest and to the data that this rank writes. Buffers, items and states of generators are
/// copied. The momentum of outer steps and kept gradients are not copied.
void CheckpointSave::add_tensors() {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const auto& [name, buffer] = buffers_[i];
    const std::vector<std::int64_t> own = ranks_with_own(i);
    if (rank_ == 0) writer_->add(kBuffer, name, buffer);
    if (std::ranges::find(own, rank_) != own.end()) writer_->add(buffer_of_rank(rank_), name, buffer);
    manifest_.buffers.push_back(describe_tensor(name, buffer));
    manifest_.buffers.back().ranks = own;
  }
  for (const auto& [name, item] : host_items_) {
    writer_->add(kItem, name, item);
    manifest_.items.push_back(describe_tensor(name, item));
  }
  manifest_.json_items = items_.json;
  manifest_.data = items_.data;
  add_outer_momentum();
  if (manifest_.residuals) add_residuals(training_->gradients.reducer->kept(), rank_, *writer_);
  writer_->add(kGenerator, std::to_string(rank_), training_->generator_to_keep());
  const ComputeDevice& device = training_->job.accelerator.device;
  if (device.is_queued) writer_->add(kGpuGenerator, std::to_string(rank_), state_of_generator(device.device));
}

/// Adds the momentum of outer steps, for the elements whose masters this rank writes.
void CheckpointSave::add_outer_momentum() {
  const AxisPlacement axes = training_->plan.placement().optimizer;
  const auto add = [&](const FlatGroup& group, std::size_t i, Extent run, float* momentum) {
    const Extent written = intersect(run, written_part(axes, training_->job.position, group.layout.numel()));
    if (written.numel > 0) {
      writer_->add(kOuterMomentum, group.parameters[i].name, written.offset - group.layout.extent(i).offset,
                   {momentum + (written.offset - run.offset), static_cast<std::size_t>(written.numel)}, group.device);
    }
    return absl::OkStatus();
  };
  training_->sync.for_each_momentum(add).IgnoreError();  // `add` never fails
}

absl::Status CheckpointSave::hold(std::span<std::byte> room) {
  const absl::Status held =
      share_status(*training_->job.axes.control, "checkpoint copied", status_from([&] { return writer_->hold(room); }));
  training_ = nullptr;
  return held;
}

absl::StatusOr<std::string> CheckpointSave::end(Collectives& control) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                           share_outcomes(control, "checkpoint written", [&] { return write(); }));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                           share_outcomes(control, "checkpoint committed", [&] { return commit(files); }));
  return paths[0];
}

/// Writes this rank's file, and returns its description as a manifest of one file.
absl::StatusOr<std::string> CheckpointSave::write() {
  const std::string number = std::to_string(rank_), zeros(5 - std::min<std::size_t>(5, number.size()), '0');
  const auto count = [&](std::size_t bytes) {
    written_ += static_cast<std::int64_t>(bytes);
    return is_cancelled_ ? make_error(ExitCode::kPeerLost,
                                      who_ +
                                          ": training ended while the checkpoint was written. [T0097] hint: go on from "
                                          "the one before; the first failure, not this one, is what to repair")
                         : absl::OkStatus();
  };
  TESSERA_ASSIGN_OR_RETURN(SavedFile file,
                           writer_->write(unfinished_path_, "rank-" + zeros + number + ".safetensors", who_, count));
  Manifest manifest;
  manifest.files.push_back(std::move(file));
  return write_manifest(manifest);
}

absl::StatusOr<std::string> CheckpointSave::commit(const std::vector<std::string>& files) {
  if (rank_ != 0) return "";
  for (const std::string& text : files) {
    TESSERA_ASSIGN_OR_RETURN(Manifest one, read_manifest(who_, text));
    manifest_.files.push_back(std::move(one.files[0]));
  }
  TESSERA_ASSIGN_OR_RETURN(std::string path, unfinished_->commit(write_manifest(manifest_), options_.is_best));
  if (options_.keep > 0) {
    const absl::Status pruned = unfinished_->prune(options_.keep, pruned_);
    if (!pruned.ok()) log_warning("an old checkpoint could not be removed: " + message_of(pruned));
  }
  return path;
}

}  // namespace tessera
