#include "tessera/durable.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/generators.h"
#include "engine/checkpoint/inexact.h"
#include "engine/checkpoint/saved_frozen.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/engine_checkpoints.h"
#include "engine/job/outcomes.h"
#include "engine/job/processor.h"
#include "engine/job/run_scope.h"
#include "engine/moved_commits.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/log.h"
#include "runtime/base/noise.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "sharding/unrecorded.h"
#include "sharding/whole_tensors.h"
#include "tessera/span.h"

namespace tessera {
namespace {

using nlohmann::json;

// This file works as follows. `begin_commit` makes the bytes that a commit holds in addition to training state: the
// Engine's progress, buffers and generators (`parts_of`), and the program's items (`text_of_items`). DurableFiles
// writes them in the background. `end_commit` makes the commit valid on all ranks, or takes it back on all ranks.
// `Resume` does the reverse: `examine` changes nothing yet, `apply` makes all reads, which may fail, and `finish` sets
// the rest, which cannot fail.

// These are the names of the parts of a commit that are not records. kTexts and kTensors are parts of the program's
// items.
constexpr const char* kEngine = "engine";
constexpr const char* kOwnGenerator = "generator";
constexpr const char* kOwnGpuGenerator = "generator of the GPU";
constexpr const char* kItems = "items";
constexpr const char* kTexts = "json";
constexpr const char* kTensors = "tensors";

std::string text_of(const at::Tensor& host) {
  const std::span<std::byte> bytes = bytes_of(host);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Fills the tensor, which is in host memory, from `text`. Returns false if `text` has another number of bytes.
bool fill(const at::Tensor& host, std::string_view text) {
  const std::span<std::byte> bytes = bytes_of(host);
  if (bytes.size() != text.size()) return false;
  if (!bytes.empty()) std::memcpy(bytes.data(), text.data(), bytes.size());
  return true;
}

std::string item_part(const std::string& name) { return "item:" + name; }
std::string buffer_part(const std::string& name) { return "buffer:" + name; }

/// Returns the number of updates of each parameter that was updated, by the parameter's number.
json updates_of(const std::vector<std::unique_ptr<Unit>>& units, const StepProgress& progress) {
  json updates = json::object();
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    const auto found = progress.updates.find(parameter.tensor.unsafeGetTensorImpl());
    if (found != progress.updates.end()) updates[std::to_string(parameter.number)] = found->second;
  });
  return updates;
}

json text_of_cursor(const SamplerCursor& cursor) {
  return {cursor.epoch, cursor.consumed, cursor.num_samples, cursor.seed, cursor.shuffle};
}

SamplerCursor read_cursor(const json& text) {
  return {text.at(0).get<std::int64_t>(), text.at(1).get<std::int64_t>(), text.at(2).get<std::int64_t>(),
          text.at(3).get<std::uint64_t>(), text.at(4).get<bool>()};
}

/// Returns the program's items as bytes. Throws tessera::Error (64) for an item that cannot be written.
std::string text_of_items(const CheckpointItems& items) {
  CommitParts parts;
  json tensors = json::array();
  for (const auto& [name, text] : items.json)
    expect(json::accept(text), "commit_durable: the item \"", name,
           "\" is no JSON text. [T0100] hint: a text as a JSON library's dump writes it, so words stand in quotes");
  for (const auto& [name, tensor] : items.tensors) {
    expect(tensor.defined(), "commit_durable: the item \"", name,
           "\" is an undefined tensor. [T0101] hint: give it a value, or leave the item out");
    tensors.push_back({name, safetensors_word(tensor.scalar_type(), "item \"" + name + "\""), tensor.sizes().vec()});
    parts[item_part(name)] = text_of(host_copy(tensor));
  }
  json texts = {{"json", items.json}};
  if (items.data) texts["data"] = text_of_cursor(*items.data);
  parts[kTexts] = texts.dump();
  parts[kTensors] = tensors.dump();
  return write_parts(parts);
}

/// Returns everything that a commit holds except training state and items.
CommitParts parts_of(const Training& training) {
  const Job& job = training.job;
  const StepProgress progress = training.step->progress();
  json engine = {{"applied", progress.applied},
                 {"samples", progress.samples},
                 {"noise", kNoiseVersion},
                 {"defaults", job.strategy.optimizer.defaults_version},
                 {"scaler", {progress.scaler.scale, progress.scaler.finite_steps, progress.scaler.overflow_steps}},
                 {"rates", json::array()},
                 {"options", options_by_name(progress.options)},
                 {"losses", {progress.losses.losses, progress.losses.spikes_in_a_row}},
                 {"updates", updates_of(training.units, progress)}};
  for (const double rate : progress.rates) engine["rates"].push_back(rate == rate ? json(rate) : json(nullptr));
  if (const NoiseState& noise = progress.noise; job.strategy.noise_scale.every > 0)
    engine["noise_scale"] = json::array({noise.square, noise.variance, noise.weight, noise.batch});
  CommitParts parts;
  for (const auto& buffer : whole_tensors(*job.module, job.strategy.units))
    parts[buffer_part(buffer.key())] = text_of(host_copy(buffer.value().detach()));
  parts[kOwnGenerator] = text_of(training.generator_to_keep());
  const ComputeDevice device = job.accelerator.device;
  if (device.is_queued) parts[kOwnGpuGenerator] = text_of(state_of_generator(device.device));
  parts[kEngine] = engine.dump();
  add_processor(job, parts);
  return parts;
}

/// Brings the Engine to the state that a commit holds. Every rank makes a Resume.
class Resume {
 public:
  Resume(Training& training, DurableFiles& files)
      : job_(training.job),
        training_(training),
        files_(files),
        step_(files.last()->step),
        parts_(files.last()->parts) {}

  /// Reads the commit's data about its run, and changes nothing. Errors: those of other_processor.
  absl::Status examine() {
    engine_ = json::parse(parts_.at(kEngine));
    TESSERA_ASSIGN_OR_RETURN(const auto other, other_processor(processor_in(parts_), job_, files_.folder()));
    note(other);
    return absl::OkStatus();
  }

  absl::Status apply() {
    const Unrecorded unrecorded;
    TESSERA_ASSIGN_OR_RETURN(const std::string kept, files_.kept());
    if (!kept.empty() && !read_frozen(kept, training_.units, frozen_)) return no_frozen();
    TESSERA_RETURN_IF_ERROR(files_.bring_back());
    const NamedTensors buffers = whole_tensors(*job_.module, job_.strategy.units);
    for (const auto& [part, bytes] : parts_) {
      if (!part.starts_with(buffer_part(""))) continue;
      const std::string name = part.substr(buffer_part("").size());
      if (!buffers.contains(name)) return other_bytes(name, at::empty({0}));
    }
    for (const auto& item : buffers) {
      const at::Tensor value = at::empty(item.value().sizes(), item.value().options().device(c10::kCPU));
      if (!fill(value, parts_[buffer_part(item.key())])) return other_bytes(item.key(), value);
      at::Tensor(item.value()).copy_(value);
    }
    read_generator(kOwnGenerator, c10::Device(c10::kCPU));
    const ComputeDevice device = job_.accelerator.device;
    // If "reproducible" is set, each microbatch sets the GPU's generator, so its state is not needed.
    if (device.is_queued && !job_.strategy.reproducible) read_generator(kOwnGpuGenerator, device.device);
    return read_items();
  }

  /// Sets the rest of the state. This function cannot fail.
  LoadedCheckpoint finish() {
    // Version 0.1 wrote commits without the key "defaults".
    training_.use_defaults(std::min(engine_.value("defaults", std::int64_t{1}), OptimizerConfig::kDefaultsVersion));
    StepProgress progress = training_.step->progress();
    progress.applied = engine_.at("applied").get<std::int64_t>();
    progress.samples = engine_.value("samples", std::int64_t{0});  // version 0.1 wrote no "samples"
    note(unknown_samples(job_.strategy, progress.applied, progress.samples));
    const json& scaler = engine_.at("scaler");
    if (job_.strategy.mixed_precision.loss_scale.dynamic)
      progress.scaler = {scaler.at(0).get<float>(), scaler.at(1).get<std::int64_t>(), scaler.at(2).get<std::int64_t>()};
    std::vector<std::optional<double>> rates;
    for (const json& rate : engine_.value("rates", json::array()))
      rates.push_back(rate.is_null() ? std::nullopt : std::optional(rate.get<double>()));
    note(read_rates(job_.strategy, rates, "commit", progress.rates));
    using Rows = std::vector<std::map<std::string, double>>;
    note(read_options(engine_.value("options", Rows()), progress.options));
    engine_.at("losses").at(0).get_to(progress.losses.losses);
    engine_.at("losses").at(1).get_to(progress.losses.spikes_in_a_row);
    // A commit without the key "noise_scale" belongs to a run that did not measure noise.
    using Numbers = std::array<double, 4>;
    const auto [square, variance, weight, size] = engine_.value("noise_scale", Numbers{});
    progress.noise = {square, variance, weight, size};
    const json& updates = engine_.at("updates");
    for_each_parameter(training_.units, [&](const FlatGroup& group, std::size_t i) {
      const FlatParameter& parameter = group.parameters[i];
      const auto found = updates.find(std::to_string(parameter.number));
      if (found != updates.end()) progress.updates[parameter.tensor.unsafeGetTensorImpl()] = found->get<std::int64_t>();
    });
    training_.step->resume(progress);
    training_.times.attempts = step_;
    training_.take_seed(state_in(kOwnGenerator));
    training_.seed_microbatch();
    training_.frozen_states = std::move(frozen_);
    training_.accept_new_values();
    // A commit without the key "noise" belongs to a program whose noise had version 1 (kNoiseVersion).
    note(other_noise(job_.strategy, engine_.value("noise", std::int64_t{1})));
    loaded_.path = files_.folder();
    loaded_.step = step_;
    return std::move(loaded_);
  }

 private:
  void read_generator(const char* part, c10::Device device) { set_generator(device, state_in(part)); }

  /// Returns the state of a generator that the commit holds in `part`.
  at::Tensor state_in(const char* part) {
    const std::string& text = parts_[part];
    const at::Tensor state = at::empty({static_cast<std::int64_t>(text.size())}, at::TensorOptions(at::kByte));
    fill(state, text);
    return state;
  }

  /// Adds `inexact`, if there is such a text, to LoadedCheckpoint::inexact.
  void note(std::optional<std::string> inexact) {
    if (inexact) loaded_.inexact.push_back(*std::move(inexact));
  }

  absl::Status other_bytes(const std::string& name, const at::Tensor& wanted) {
    return make_error(ExitCode::kCorruptData, c10::str(files_.folder(), ": the commit of step ", step_, " holds ",
                                                       parts_[buffer_part(name)].size(), " bytes of the buffer \"",
                                                       name, "\", and ", wanted.nbytes(),
                                                       " are wanted. [T0102] hint: where forward makes the buffer, or "
                                                       "gives it this size, run a forward before resume_durable"));
  }

  absl::Status read_items() {
    CommitParts items;
    if (!read_parts(parts_[kItems], items)) return no_items();
    const json texts = json::parse(items[kTexts]);
    loaded_.items.json = texts.at("json").get<std::map<std::string, std::string>>();
    if (texts.contains("data")) loaded_.items.data = read_cursor(texts.at("data"));
    for (const json& item : json::parse(items[kTensors])) {
      const auto name = item.at(0).get<std::string>();
      const auto type = type_of_word(item.at(1).get<std::string>());
      if (!type) return no_items();
      const at::Tensor value = at::empty(item.at(2).get<std::vector<std::int64_t>>(), at::TensorOptions(*type));
      if (!fill(value, items[item_part(name)])) return no_items();
      loaded_.items.tensors[name] = value;
    }
    return absl::OkStatus();
  }

  absl::Status no_items() const { return of_another_version("items that are none of commit_durable"); }
  absl::Status no_frozen() const { return of_another_version("states of frozen parameters in another form"); }

  absl::Status of_another_version(const char* what) const {
    return make_error(ExitCode::kCorruptData,
                      c10::str(files_.folder(), ": the commit of step ", step_, " holds ", what,
                               ". [T0103] hint: another version of Tessera wrote "
                               "it: resume with that one, or remove the folder on every host to begin anew"));
  }

  Job& job_;
  Training& training_;
  DurableFiles& files_;
  const std::int64_t step_;
  CommitParts parts_;  ///< a copy, since the commit itself changes while it is restored
  json engine_;
  FrozenStates frozen_;
  LoadedCheckpoint loaded_;
};

absl::Status with_step(const absl::Status& failure, std::int64_t step) {
  if (failure.ok()) return failure;
  return make_error(exit_code_of(failure),
                    c10::str("the commit of step ", step, " was not made: ", message_of(failure)));
}

/// Returns the text without its hint; the caller adds another hint.
std::string without_hint(const std::string& text) { return text.substr(0, text.find(". [T")); }

/// Waits for this rank's writing thread.
absl::Status end_own(DurableFiles& files) {
  return status_from([&] { return files.end(); });
}

/// Completes the commit under way. After that, the commit is on the disks of all ranks or of none.
absl::Status end_commit(Job& job, DurableFiles& files) {
  Collectives& control = *job.axes.control;
  const std::int64_t step = files.next_step();
  const absl::Status written = share_status(control, "commit written", end_own(files));
  if (written.ok()) {
    files.committed();
    return written;
  }
  // When this commit is removed, its places on the disk become free, and a later commit may write to them. So this
  // commit must first be removed from the disks of all ranks.
  const absl::Status gone = share_status(control, "commit taken back", status_from([&] { return files.take_back(); }));
  if (gone.ok()) return written;
  const absl::Status both =
      make_error(exit_code_of(written),
                 without_hint(message_of(written)) + "; then it could not be taken back: " + message_of(gone));
  job.fail(with_step(both, step));
  return both;
}

absl::Status begin_commit(const Training& training, DurableFiles& files, const CheckpointItems& items) {
  Collectives& control = *training.job.axes.control;
  CommitParts parts;
  std::string text;
  // An item that cannot be written is reported before anything is written.
  const auto describe = [&] {
    text = text_of_items(items);
    parts = parts_of(training);
    return absl::OkStatus();
  };
  TESSERA_RETURN_IF_ERROR(share_status(control, "commit begun", status_from(describe)));
  TESSERA_ASSIGN_OR_RETURN(parts[kItems], broadcast_string(control, "commit's items", text, 0));
  const bool is_first = !files.last();
  files.begin(training.times.attempts, parts);
  if (!is_first) return absl::OkStatus();
  // A single first commit looks like one that was being written when its run was killed, and the next run forgets such
  // a commit. So the first commit is made twice before training continues.
  TESSERA_RETURN_IF_ERROR(end_commit(training.job, files));
  files.begin(training.times.attempts, parts);
  return end_commit(training.job, files);
}

}  // namespace

void Saving::settle_commit() {
  if (!durable || !durable->is_under_way()) return;
  const Span span("end of commit");
  const std::int64_t step = durable->next_step();
  const bool had_failed = job.failed;
  commit_failure = with_step(end_commit(job, *durable), step);
  commit_ended_job = job.failed && !had_failed;
}

void Saving::leave_commit() {
  if (!durable) return;
  if (durable->is_under_way()) commit_failure = with_step(end_own(*durable), durable->next_step());
  if (commit_failure.ok() || commit_ended_job) return;
  log_error(message_of(commit_failure));
  if (RunScope::current) RunScope::current->late_failure.Update(commit_failure);
}

void EngineCheckpoints::finish_commit() {
  expect_durable("finish_commit");
  job_.or_abort("finish_commit", [&] { saving_.settle_commit(); });
  throw_if_error(std::exchange(saving_.commit_failure, absl::OkStatus()));
}

void EngineCheckpoints::expect_durable(const char* call) const {
  expect(saving_.durable != nullptr, call,
         " without \"durable\" in the strategy. [T0104] hint: set durable.every and durable.dir");
  expect(training_.window.microbatch == 0, call,
         " between backward and step. [T0105] hint: call step() or zero_grad() first");
  training_.expect_weights(call);
  expect(training_.values.open_guards == 0, call, " under a Gathered guard. [T0106] hint: close that guard first");
}

std::optional<std::int64_t> EngineCheckpoints::commit_to_resume() const {
  if (saving_.moved) return saving_.moved->step;
  const DurableFiles* const files = saving_.durable.get();
  if (!files || !files->last() || files->is_resumed()) return std::nullopt;
  return files->last()->step;
}

bool EngineCheckpoints::commit(const CheckpointItems& items) {
  expect_durable("commit_durable");
  DurableFiles& files = *saving_.durable;
  const std::int64_t step = commit_to_resume().value_or(0);
  expect(step == 0, "commit_durable: durable.dir ", files.folder(), " holds step ", step,
         " of an earlier run, from which this run did not go on. [T0107] hint: call resume_durable before the first "
         "step; or remove the folder on every host");
  expect(!training_.values.half_loaded,
         "commit_durable after a load failed half-way: the values are of no one step. [T0108] hint: load a checkpoint "
         "that is whole, or make the Engine anew");
  finish_commit();  // completes the commit before this one
  const std::int64_t attempts = training_.times.attempts;
  if (attempts == 0 || attempts % job_.strategy.durable.every != 0) return false;
  const Span span("commit");
  const bool is_first = !files.last();
  throw_if_error(with_step(job_.or_abort("commit_durable",
                                         [&] {
                                           training_.expect_parameters();
                                           return begin_commit(training_, files, items);
                                         }),
                           attempts));
  // The first commit is on the disks of all ranks now (begin_commit), so the state that the run went on from is not
  // needed any more.
  if (is_first && job_.mesh.rank() == 0) remove_moved_checkpoint(files.folder());
  return true;
}

LoadedCheckpoint EngineCheckpoints::resume_moved(Engine& engine) {
  EngineCheckpoints(engine).expect_durable("resume_durable");
  const MovedCommits moved = *engine.state_->saving.moved;
  LoadedCheckpoint loaded = load(engine, moved.path);
  Saving& saving = engine.state_->saving;
  saving.last_checkpoint = {};  // the first commit removes the checkpoint, so no spike may go back to it
  saving.moved.reset();
  loaded.inexact.insert(loaded.inexact.begin(), moved.inexact.begin(), moved.inexact.end());
  return loaded;
}

std::optional<LoadedCheckpoint> EngineCheckpoints::resume_durable() {
  expect_durable("resume_durable");
  DurableFiles& files = *saving_.durable;
  if (!files.last()) return std::nullopt;
  expect(!files.is_resumed(),
         "resume_durable after this run's first commit, or twice. [T0109] hint: call it once, before the first step");
  finish();
  return value_or_throw(job_.or_abort("resume_durable", [&]() -> absl::StatusOr<LoadedCheckpoint> {
    training_.expect_parameters();
    Resume resume(training_, files);
    training_.drop_gathered();
    // This call is a barrier: no rank may still read parts that others write from here on.
    TESSERA_RETURN_IF_ERROR(
        share_status(*job_.axes.control, "commit found", status_from([&] { return resume.examine(); })));
    training_.values.half_loaded = true;
    TESSERA_RETURN_IF_ERROR(
        share_status(*job_.axes.control, "commit brought back", status_from([&] { return resume.apply(); })));
    LoadedCheckpoint loaded = resume.finish();
    training_.values.half_loaded = false;
    if (job_.mesh.rank() != 0) return loaded;
    log_info("goes on from " + loaded.path + ", after step " + std::to_string(loaded.step));
    training_.report_frozen_states();
    for (const std::string& inexact : loaded.inexact) log_warning(loaded.path + ": " + inexact);
    return loaded;
  }));
}

bool commit_durable(Engine& engine, const CheckpointItems& items) { return EngineCheckpoints(engine).commit(items); }

void finish_commit(Engine& engine) { EngineCheckpoints(engine).finish_commit(); }

std::optional<LoadedCheckpoint> resume_durable(Engine& engine) {
  EngineCheckpoints checkpoints(engine);
  if (checkpoints.has_moved()) return EngineCheckpoints::resume_moved(engine);
  return checkpoints.resume_durable();
}

}  // namespace tessera
