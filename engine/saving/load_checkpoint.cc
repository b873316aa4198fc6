#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/files/hash.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/generators.h"
#include "engine/checkpoint/inexact.h"
#include "engine/checkpoint/matched_checkpoint.h"
#include "engine/checkpoint/saved_frozen.h"
#include "engine/checkpoint/saved_residuals.h"
#include "engine/checkpoint/state_reader.h"
#include "engine/checkpoint/stored_states.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/engine_checkpoints.h"
#include "engine/job/outcomes.h"
#include "engine/job/processor.h"
#include "engine/saving/background_save.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_names.h"
#include "sharding/host_view.h"
#include "sharding/unrecorded.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

// This file works as follows. Loading has two phases. The first, `examine`, changes nothing. Rank 0 finds the folder.
// Every rank opens the checkpoint, matches it with the Engine, and verifies its share of the chunks. Then ranks compare
// the hashes of the manifest. The second phase, `run`, changes the Engine. First `apply` reads masters, states,
// residuals, buffers, items and generators. These reads may still fail; the error then says that the Engine is partly
// loaded. `apply` waits for no other rank, since a rank that has failed would never answer. `finish` sets the rest,
// which cannot fail. A run that goes back to an earlier checkpoint after a spike uses the same two phases.

/// The values that are loaded.
enum class LoadKind : std::uint8_t {
  kAll,
  kBackInTime,  ///< the run continues with older values; step numbers, generators, rates and options set by hand stay
};

/// A rank appends this text to the checkpoint's hash if the checkpoint has the rank's own residuals.
constexpr std::string_view kHasOwnResiduals = " own residuals";

/// Loads one checkpoint. Every rank makes a Load, and all ranks make the same calls.
class Load {
 public:
  /// `durable` is null if the strategy does not have the key "durable".
  Load(Training& training, DurableFiles* durable, const std::string& path, LoadKind kind)
      : job_(training.job),
        training_(training),
        durable_(durable),
        kind_(kind),
        path_(path),
        rank_(job_.mesh.rank()),
        who_("rank " + std::to_string(rank_)),
        states_(job_.strategy, job_.own_rules, training.units),
        kept_(training.gradients.reducer->kept()) {}

  /// Finds the checkpoint and checks all of it, but changes nothing. Returns its step. It is collective.
  absl::StatusOr<std::int64_t> examine() {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> paths, share("checkpoint found", [&] { return find(); }));
    path_ = paths[0];
    // Gathered values will be out of date, so they are released. The exchange below is a barrier: no rank may still
    // read parts that other ranks write.
    training_.drop_gathered();
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> seen,
                             share("checkpoint looked at", [&] { return look(); }));
    TESSERA_RETURN_IF_ERROR(expect_same(seen));
    return manifest().step;
  }
  const std::string& path() const { return path_; }

  /// Loads the examined checkpoint. It is collective.
  absl::StatusOr<LoadedCheckpoint> run() {
    training_.values.half_loaded = true;
    keep_defaults();
    const auto applied = share("checkpoint loaded", [&] { return apply(); });
    if (!applied.ok())
      return make_error(
          exit_code_of(applied.status()),
          message_of(applied.status()) +
              ". The Engine is not as it was: some of its values are the checkpoint's already. [T0183] hint: load a "
              "checkpoint that is whole, or make the Engine anew");
    training_.sync.adopt();  // called after all ranks have read, since asynchronous ranks meet here
    finish();
    training_.values.half_loaded = false;
    return std::move(loaded_);
  }

 private:
  template <class Body>
  absl::StatusOr<std::vector<std::string>> share(const char* label, const Body& body) {
    return share_outcomes(*job_.axes.control, label, body);
  }

  absl::StatusOr<std::string> find() {
    if (rank_ != 0) return "";
    return find_checkpoint(std::filesystem::absolute(path_).string(), who_);
  }

  /// Checks the whole checkpoint, before anything is changed. Each rank verifies an equal share of the chunks. Returns
  /// the manifest's hash, followed by kHasOwnResiduals if the checkpoint has this rank's own residuals.
  absl::StatusOr<std::string> look() {
    progress_ = training_.step->progress();
    TESSERA_ASSIGN_OR_RETURN(checkpoint_, SavedCheckpoint::open(path_, who_));
    absl::StatusOr<MatchedCheckpoint> matched = match_checkpoint(
        training_.units, whole_tensors(*job_.module, job_.strategy.units), states_, checkpoint_->manifest());
    if (!matched.ok()) return make_error(exit_code_of(matched.status()), path_ + ": " + message_of(matched.status()));
    matched_ = *std::move(matched);
    note(other_noise(job_.strategy, checkpoint_->manifest().noise_version));
    if (kind_ == LoadKind::kAll) {  // a run that goes back in time is still on the same processor
      TESSERA_ASSIGN_OR_RETURN(const auto other, other_processor(manifest().processor, job_, path_));
      note(other);
    }
    const std::int64_t chunks = checkpoint_->chunks(), ranks = job_.mesh.world_size();
    for (std::int64_t chunk = chunks * rank_ / ranks; chunk < chunks * (rank_ + 1) / ranks; ++chunk)
      TESSERA_RETURN_IF_ERROR(checkpoint_->verify(chunk));
    return hash_text(checkpoint_->hash()) + (residuals().has_own() ? std::string(kHasOwnResiduals) : "");
  }

  /// Compares the results of `look` on all ranks; this function returns the same on every rank.
  absl::Status expect_same(std::vector<std::string> hashes) {
    own_residuals_ =
        std::ranges::all_of(hashes, [](std::string_view text) { return text.ends_with(kHasOwnResiduals); });
    for (std::string& text : hashes) text.resize(hash_text(0).size());
    for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
      if (hashes[rank] == hashes[0]) continue;
      return make_error(ExitCode::kCorruptData,
                        path_ + "/manifest.json has the hash " + hashes[0] + " on rank 0 and " + hashes[rank] +
                            " on rank " + std::to_string(rank) +
                            ": ranks see different files. [T0184] hint: the folder must be one that all ranks share");
    }
    return absl::OkStatus();
  }

  /// Sets keys that the strategy does not name to the defaults of the run that was saved. A run that goes back to an
  /// earlier checkpoint of itself has these defaults already.
  void keep_defaults() {
    if (kind_ == LoadKind::kBackInTime) return;
    if (manifest().defaults_version > OptimizerConfig::kDefaultsVersion)
      matched_.inexact.push_back(
          "the run that was saved had defaults of a later version of Tessera; what the strategy leaves out has this "
          "version's");
    if (!training_.use_defaults(std::min(manifest().defaults_version, OptimizerConfig::kDefaultsVersion))) return;
    StepProgress anew = training_.step->progress();
    anew.scaler = progress_.scaler;
    anew.losses = std::move(progress_.losses);
    anew.options = std::move(progress_.options);
    progress_ = std::move(anew);
  }

  absl::StatusOr<std::string> apply() {
    const Unrecorded unrecorded;
    TESSERA_ASSIGN_OR_RETURN(frozen_,
                             StateReader(*checkpoint_, matched_, states_, rank_, job_.mesh.world_size()).read());
    TESSERA_RETURN_IF_ERROR(read_residuals());
    TESSERA_RETURN_IF_ERROR(read_outer_momentum());
    TESSERA_RETURN_IF_ERROR(read_buffers());
    if (kind_ == LoadKind::kBackInTime) return "";
    TESSERA_RETURN_IF_ERROR(read_items());
    TESSERA_RETURN_IF_ERROR(read_generators());
    return "";
  }

  const Manifest& manifest() const { return checkpoint_->manifest(); }

  absl::StatusOr<at::Tensor> read_tensor(const std::string& what, const SavedTensor& saved) {
    const at::Tensor tensor = at::empty(saved.shape, at::TensorOptions(*type_of_word(saved.dtype)));
    TESSERA_RETURN_IF_ERROR(checkpoint_->read(what, saved.name, 0, bytes_of(tensor)));
    return tensor;
  }

  bool keeps_residuals() const { return training_.plan.sums().kept_gradient_numel > 0; }

  ResidualReader residuals() {
    const SavedResiduals wanted{training_.plan.wire().accumulation,
                                momentum_of_residuals(job_.strategy.compression.method)};
    return {*checkpoint_, kept_, rank_, job_.mesh.world_size(), wanted};
  }

  absl::Status read_residuals() {
    training_.gradients.reducer->forget_feedback();
    const bool saved = manifest().residuals.has_value();
    if (saved && !keeps_residuals())
      matched_.inexact.push_back(
          "the Engine does not compress gradients, so what the checkpoint has of those that were left "
          "over was left out");
    if (!saved && keeps_residuals())
      matched_.inexact.push_back(
          "the checkpoint has nothing of what compression left over of gradients, so that begins with zeros");
    if (!saved || !keeps_residuals()) return absl::OkStatus();
    if (!own_residuals_)
      matched_.inexact.push_back(
          "ranks, units or compression are others than in the run that was saved, so each rank goes "
          "on with the mean of what compression left over of gradients");
    return residuals().read(own_residuals_);
  }

  /// Reads the momentum of outer weights. Outer weights are equal to the masters that were read; these are the same in
  /// all replicas.
  absl::Status read_outer_momentum() {
    training_.sync.forget_momentum();
    if (!training_.sync.config().has_outer_optimizer()) {
      const bool saved = std::ranges::any_of(manifest().parameters, [&](const SavedParameter& parameter) {
        return !checkpoint_->pieces(kOuterMomentum, parameter.name).empty();
      });
      if (saved)
        matched_.inexact.push_back(
            "the Engine has no outer optimizer, so the checkpoint's momentum of outer steps was left out");
      return absl::OkStatus();
    }
    bool all = true;
    const auto read = [&](const FlatGroup& group, std::size_t i, Extent run, float* momentum) {
      const std::string& name = group.parameters[i].name;
      if (checkpoint_->pieces(kOuterMomentum, name).empty()) {
        all = false;
        return absl::OkStatus();
      }
      const HostView view(momentum, run.numel * 4, group.device, HostView::kUndefined);
      TESSERA_RETURN_IF_ERROR(checkpoint_->read(kOuterMomentum, name, run.offset - group.layout.extent(i).offset,
                                                {view.data(), static_cast<std::size_t>(run.numel) * 4}));
      view.write_back();
      return absl::OkStatus();
    };
    TESSERA_RETURN_IF_ERROR(training_.sync.for_each_momentum(read));
    if (!all)
      matched_.inexact.push_back(
          "the checkpoint does not have the momentum of outer steps of all parameters, which begins with zeros");
    return absl::OkStatus();
  }

  absl::Status read_buffers() {
    const bool same_ranks = manifest().ranks == job_.mesh.world_size();
    NamedTensors buffers = whole_tensors(*job_.module, job_.strategy.units);
    for (const SavedTensor& saved : manifest().buffers) {
      const bool has_own = std::ranges::find(saved.ranks, rank_) != saved.ranks.end();
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor value,
                               read_tensor(same_ranks && has_own ? buffer_of_rank(rank_) : kBuffer, saved));
      at::Tensor buffer = buffers[saved.name];
      buffer.copy_(value);
      if (!same_ranks && !saved.ranks.empty())
        matched_.inexact.push_back("the buffer \"" + saved.name +
                                   "\" was another one on each rank, and is rank 0's now");
    }
    return absl::OkStatus();
  }

  absl::Status read_items() {
    for (const SavedTensor& saved : manifest().items) {
      TESSERA_ASSIGN_OR_RETURN(loaded_.items.tensors[saved.name], read_tensor(kItem, saved));
    }
    loaded_.items.json = manifest().json_items;
    loaded_.items.data = manifest().data;
    return absl::OkStatus();
  }

  absl::Status read_generators() {
    if (job_.strategy.reproducible) return read_generator(kGenerator, c10::Device(c10::kCPU), 0);
    if (manifest().generators < job_.mesh.world_size())
      matched_.inexact.push_back("the checkpoint is of " + std::to_string(manifest().generators) +
                                 " ranks, so ranks from that number on keep the generators that they have");
    if (rank_ >= manifest().generators) return absl::OkStatus();
    TESSERA_RETURN_IF_ERROR(read_generator(kGenerator, c10::Device(c10::kCPU), rank_));
    const bool has_gpu = job_.accelerator.device.is_queued;
    const bool saved_gpu = !checkpoint_->pieces(kGpuGenerator, std::to_string(rank_)).empty();
    if (has_gpu != saved_gpu)
      matched_.inexact.push_back(has_gpu ? "the checkpoint is of a run on the CPU, so the GPU keeps its generator"
                                         : "the checkpoint is of a run on a GPU, whose generator's state was left out");
    return has_gpu && saved_gpu ? read_generator(kGpuGenerator, job_.accelerator.device.device, rank_)
                                : absl::OkStatus();
  }

  absl::Status read_generator(const std::string& what, c10::Device device, int of_rank) {
    const std::string name = std::to_string(of_rank);
    std::int64_t bytes = 0;
    for (const SavedCheckpoint::Place& place : checkpoint_->pieces(what, name)) bytes += place.piece.numel;
    const std::int64_t wanted = state_of_generator(device).numel();
    if (bytes != wanted)
      return make_error(ExitCode::kCorruptData,
                        who_ + ": " + path_ + ": the state of LibTorch's generator has " + std::to_string(bytes) +
                            " bytes, this LibTorch's has " + std::to_string(wanted) +
                            ". [T0185] hint: load it with the version of LibTorch that saved it");
    const at::Tensor state = at::empty({bytes}, at::TensorOptions(at::kByte));
    TESSERA_RETURN_IF_ERROR(checkpoint_->read(what, name, 0, bytes_of(state)));
    set_generator(device, state);
    return absl::OkStatus();
  }

  /// Sets the rest of the state. This function cannot fail.
  void finish() {
    StepProgress& progress = progress_;
    const SavedProgress& saved = manifest().progress;
    progress.applied = saved.steps_applied;
    progress.samples = saved.samples_seen;
    note(unknown_samples(job_.strategy, progress.applied, progress.samples));
    for (const MatchedParameter& parameter : matched_.parameters) {
      const bool goes_on = parameter.group->trainable && parameter.saved->keeps_states();
      progress.updates[parameter.group->parameters[parameter.index].tensor.unsafeGetTensorImpl()] =
          goes_on ? parameter.saved->updates : 0;
    }
    if (saved.loss_scale && job_.strategy.mixed_precision.loss_scale.dynamic)
      progress.scaler = {static_cast<float>(saved.loss_scale->scale), saved.loss_scale->finite_steps,
                         saved.loss_scale->overflow_steps};
    if (saved.losses) {
      progress.losses = {saved.losses->window, saved.losses->spikes_in_a_row};
    } else if (kind_ == LoadKind::kAll) {
      progress.losses = {};  // the present losses may be those of another run
    }
    if (const auto& noise = saved.noise_scale) {
      progress.noise = {noise->square, noise->variance, noise->weight, noise->batch};
    } else if (kind_ == LoadKind::kAll) {
      progress.noise = {};
    }
    if (kind_ == LoadKind::kAll) {
      note(read_rates(job_.strategy, saved.rates, "checkpoint", progress.rates));
      note(read_options(saved.options, progress.options));
      training_.times.attempts = manifest().step;
      training_.take_seed();
    }
    training_.seed_microbatch();
    training_.step->resume(progress);
    training_.frozen_states = std::move(frozen_);
    if (durable_) durable_->keep(write_frozen(training_.frozen_states, training_.units));
    training_.accept_new_values();
    loaded_.path = path_;
    loaded_.step = manifest().step;
    loaded_.inexact = std::move(matched_.inexact);
    if (rank_ != 0 || kind_ == LoadKind::kBackInTime) return;
    log_info("loaded " + path_ + ", of step " + std::to_string(loaded_.step));
    training_.report_frozen_states();
    for (const std::string& text : loaded_.inexact) log_warning("checkpoint " + path_ + ": " + text);
  }

  /// Adds `inexact`, if there is such a text, to MatchedCheckpoint::inexact.
  void note(std::optional<std::string> inexact) {
    if (inexact) matched_.inexact.push_back(*std::move(inexact));
  }

  Job& job_;
  Training& training_;
  DurableFiles* const durable_;
  const LoadKind kind_;
  std::string path_;
  const int rank_;
  const std::string who_;
  const StoredStates states_;
  std::unique_ptr<SavedCheckpoint> checkpoint_;
  const KeptGradients kept_;
  bool own_residuals_ = false;  ///< whether ResidualReader::has_own is true on all ranks
  MatchedCheckpoint matched_;
  FrozenStates frozen_;    ///< states of frozen parameters in the checkpoint
  StepProgress progress_;  ///< first the Engine's progress, then the checkpoint's
  LoadedCheckpoint loaded_;
};

}  // namespace

LoadedCheckpoint EngineCheckpoints::load(Engine& engine, const std::string& path) {
  const auto examined = [&engine](const std::string& at) {
    auto& [job, training, saving] = *engine.state_;
    auto load = std::make_unique<Load>(training, saving.durable.get(), at, LoadKind::kAll);
    const std::int64_t step = value_or_throw(job.or_abort("load_checkpoint", [&, &training = training] {
      training.expect_parameters();
      training.settle_commit();
      return load->examine();
    }));
    return std::pair(std::move(load), step);
  };
  {
    const Training& training = engine.state_->training;
    expect(training.window.microbatch == 0,
           "load_checkpoint between backward and step. [T0186] hint: call step() or zero_grad() first");
    training.expect_weights("load_checkpoint");
    expect(training.values.open_guards == 0,
           "load_checkpoint under a Gathered guard. [T0187] hint: close that guard first");
    EngineCheckpoints(engine).finish();
  }
  auto [load, step] = examined(path);
  // Outer steps may begin or end at the checkpoint's number of steps. If they do, follow_sync makes another
  // Engine::State, and the checkpoint must be examined again for that State.
  const std::string found = load->path();
  if (Engine::State::follow_sync(engine.state_, step)) load = examined(found).first;
  LoadedCheckpoint loaded = value_or_throw(engine.state_->job.or_abort("load_checkpoint", [&] { return load->run(); }));
  EngineCheckpoints(engine).note_last(loaded.path);
  return loaded;
}

void EngineCheckpoints::go_back(std::int64_t step) {
  constexpr int kMostReturns = 3;
  if (saving_.under_way) {
    const absl::StatusOr<std::string> saved = saving_.under_way->wait();
    if (saved.ok()) note_last(*saved);
  }
  Saving::LastCheckpoint& last = saving_.last_checkpoint;
  const bool goes = !last.path.empty() && last.returns < kMostReturns;
  if (job_.mesh.rank() == 0) {
    log_warning("step " + std::to_string(step) +
                (goes                ? ": training goes on from " + last.path + ", with the next data"
                 : last.path.empty() ? ": there is no checkpoint to go back to yet"
                                     : ": training has gone back to " + last.path + " " + std::to_string(last.returns) +
                                           " times, and does not go there again"));
  }
  if (!goes) return;
  ++last.returns;
  throw_if_error(job_.or_abort("on_spike",
                               [&]() -> absl::StatusOr<LoadedCheckpoint> {
                                 Load load(training_, saving_.durable.get(), last.path, LoadKind::kBackInTime);
                                 TESSERA_RETURN_IF_ERROR(load.examine().status());
                                 return load.run();
                               })
                     .status());
}

/// Notes the last checkpoint. If it is another checkpoint than before, the count of returns to it after spikes starts
/// at 0 again.
void EngineCheckpoints::note_last(const std::string& path) {
  if (path != saving_.last_checkpoint.path) saving_.last_checkpoint = {path};
}

LoadedCheckpoint load_checkpoint(Engine& engine, const std::filesystem::path& path) {
  return EngineCheckpoints::load(engine, path.string());
}

}  // namespace tessera
