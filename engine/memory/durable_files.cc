#include "engine/memory/durable_files.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <utility>

#include "checkpoint/files/hash.h"
#include "engine/device/pinned_memory.h"
#include "engine/memory/records/record_places.h"
#include "engine/memory/training_memory.h"
#include "optim/device_kernels.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {
namespace {

// This file works as follows. `take_memory` lists the pieces of training state that lie in memory and makes one file
// for them, the image, which is cut into records. `begin` waits for the writes of records that lie in files anyway. It
// notes where these records lie, and starts a thread (`write`). The thread copies the image record by record, syncs all
// files, writes the bytes of `keep`, and finally writes the log's entry. `end` waits for the thread; then all ranks
// call `committed`, or all call `take_back`. When a run starts, `look`, `choose` and `forget_later` find the last
// commit that all ranks have, and `bring_back` reads it.

constexpr const char* kImage = "memory";
constexpr const char* kWeights = "weights";
constexpr const char* kAbout = "about";
constexpr const char* kKept = "kept";
constexpr const char* kRanks = "ranks";

/// Returns a text for users that names the run to which the files belong.
std::string about_run(const MeshPosition& mesh, std::size_t units) {
  return c10::str(counted(mesh.world_size(), "rank"), ", mesh ", mesh.replicate_size, " x ", mesh.shard_size, ", ",
                  units, " units");
}

/// Returns the canonical text of a folder's path. Names of files contain a hash of this text, so it must not depend on
/// how the path is written.
std::string folder_of(const std::string& dir) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::weakly_canonical(std::filesystem::absolute(dir), error);
  if (error) path = std::filesystem::absolute(dir).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).string();
}

/// Returns the numbers that ranks send to each other about one commit.
nlohmann::json brief(const Commit& commit) { return {commit.generation, commit.run, commit.step, commit.layout}; }

bool is_held(const nlohmann::json& commits, const nlohmann::json& commit) {
  return std::ranges::any_of(
      commits, [&](const nlohmann::json& each) { return each.at(0) == commit.at(0) && each.at(1) == commit.at(1); });
}

/// Returns a text for users about what a rank found (DurableFiles::look).
std::string words_of(const nlohmann::json& rank) {
  std::string text;
  for (const nlohmann::json& commit : rank.at("commits"))
    text += (text.empty() ? "" : " and ") + std::to_string(commit.at(2).get<std::int64_t>());
  if (!text.empty()) return "step " + text;
  const nlohmann::json& others = rank.at("others");
  return others.empty() ? "none" : "none, beside commits of rank " + std::to_string(others.at(0).get<int>());
}

}  // namespace

std::vector<int> ranks_of_hosts(const Commit& commit) {
  const auto part = commit.parts.find(kRanks);
  return part == commit.parts.end() ? std::vector<int>() : nlohmann::json::parse(part->second).get<std::vector<int>>();
}

std::string durable_stem(const std::string& dir) {
  return c10::str("tessera-durable-", hash_text(checkpoint_hash(folder_of(dir))), "-rank-");
}

DurableFiles::DurableFiles(const DurableConfig& config, const MemoryPlan& plan, const std::string& layout,
                           std::vector<int> rank_counts, int rank)
    : folder_(folder_of(config.dir)),
      rank_(rank),
      who_("rank " + std::to_string(rank)),
      layout_(checkpoint_hash(layout)),
      scratch_stem_(durable_stem(config.dir) + std::to_string(rank)),
      notes_{about_run(plan.placement().mesh, plan.units().size()), std::move(rank_counts)} {}

absl::StatusOr<std::string> DurableFiles::look() {
  TESSERA_ASSIGN_OR_RETURN(log_, CommitLog::open(folder_, rank_, who_));
  TESSERA_ASSIGN_OR_RETURN(found_, log_->read());
  nlohmann::json told = {{"commits", nlohmann::json::array()}};
  for (const Commit& commit : found_) {
    told["commits"].push_back(brief(commit));
    const auto about = commit.parts.find(kAbout);
    if (about != commit.parts.end()) told["about"] = about->second;
  }
  told["begun"] = log_->has_begun();
  TESSERA_ASSIGN_OR_RETURN(std::vector<int> others, begun_ranks(folder_, who_));
  std::erase(others, rank_);
  told["others"] = others;
  if (rank_ == 0) told["run"] = (std::uint64_t{std::random_device()()} << 32) | std::random_device()();
  told["layout"] = layout_;
  return told.dump();
}

absl::Status DurableFiles::forget_later() {
  TESSERA_RETURN_IF_ERROR(log_->remove_leftovers());
  for (const Commit& commit : found_) {
    if (!last_ || commit.generation > last_->generation) TESSERA_RETURN_IF_ERROR(log_->remove(commit.generation));
  }
  if (last_ && last_->parts.contains(kKept)) kept_ = last_->parts.at(kKept);
  TESSERA_RETURN_IF_ERROR(log_->remove_kept_but(kept_));
  found_.clear();
  is_resumed_ = !last_;
  return absl::OkStatus();
}

void DurableFiles::choose(const std::vector<std::string>& held, bool has_moved) {
  std::vector<nlohmann::json> ranks;
  for (const std::string& text : held) ranks.push_back(nlohmann::json::parse(text));
  run_ = ranks[0].at("run").get<std::uint64_t>();
  const nlohmann::json* common = nullptr;
  // True if no rank has begun more than the first commit of its folder. Then nothing can be lost, and the run starts
  // from its beginning. The files of other ranks show that the folder is of a run whose ranks had other numbers: its
  // hosts may have changed places.
  bool is_first = true;
  for (const nlohmann::json& rank : ranks) {
    is_first = is_first && !rank.at("begun").get<bool>() && (has_moved || rank.at("others").empty());
    for (const nlohmann::json& commit : rank.at("commits")) is_first = is_first && commit.at(0) == 1;
  }
  for (const nlohmann::json& commit : ranks[0].at("commits")) {
    const bool on_all =
        std::ranges::all_of(ranks, [&](const nlohmann::json& rank) { return is_held(rank.at("commits"), commit); });
    if (on_all) common = &commit;  // the last common commit is the newest
  }
  for (std::size_t rank = 0; common && rank < ranks.size(); ++rank) {
    const auto& commits = ranks[rank].at("commits");
    const auto same =
        std::ranges::find_if(commits, [&](const nlohmann::json& commit) { return commit.at(0) == common->at(0); });
    if (same->at(3) == ranks[rank].at("layout")) continue;
    throw Error(
        ExitCode::kCorruptData,
        c10::str("durable.dir ", folder_, " holds step ", common->at(2).get<std::int64_t>(), " of a run of ",
                 ranks[rank].value("about", std::string("another kind")), "; this run is of ", notes_.about,
                 ", and its model, strategy or number of ranks is another one. [T0222] hint: take the model, strategy "
                 "and ranks of that run; or name another folder, and load a checkpoint, which any run can: tessera "
                 "checkpoint from-commits makes one of these commits"));
  }
  if (!common && !is_first) {
    std::string text = "durable.dir " + folder_ + ": there is no step that all ranks hold:";
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      text += c10::str(rank > 0 ? "," : "", " rank ", rank, " has ", words_of(ranks[rank]));
    throw Error(
        ExitCode::kNoInput,
        text +
            ". [T0223] hint: are these the same hosts, disks and number of ranks as before? For another number, "
            "tessera checkpoint from-commits makes a checkpoint. To begin anew, remove the folder on every host");
  }
  if (!common) return;
  for (Commit& commit : found_) {
    if (commit.generation == common->at(0).get<std::int64_t>()) last_ = commit;
  }
}

std::optional<std::vector<double>> DurableFiles::weights() const {
  if (!last_) return std::nullopt;
  const auto part = last_->parts.find(kWeights);
  if (part == last_->parts.end()) return std::nullopt;
  return nlohmann::json::parse(part->second).get<std::vector<double>>();
}

void DurableFiles::use_weights(const std::vector<double>& weights) { weights_ = weights; }

void DurableFiles::protect(TierCarrier& records, const std::string& kind) const {
  if (!last_) return;
  const auto part = last_->parts.find(kind);
  records.between_passes([&](DurableTier& tier) {
    throw_if_error(tier.protect(part == last_->parts.end() ? std::string_view() : std::string_view(part->second)));
  });
}

std::int64_t kept_gradient_bytes(const MemoryPlan& plan) { return 4 * plan.sums().kept_gradient_numel; }

void DurableFiles::add_piece(std::byte* memory, std::int64_t bytes, MemoryPlace place) {
  if (bytes > 0) image_.pieces.push_back({{memory, static_cast<std::size_t>(bytes)}, place});
}

/// Adds `records` to the records that commits hold. Records in files are durable by themselves. Records that stay in
/// memory (cached), and records in pinned memory, become part of the image.
void DurableFiles::add_records(const std::shared_ptr<TierCarrier>& records, const RecordPool& pool, const char* kind) {
  if (!records) return;
  const MemoryPlace on_host(c10::Device(c10::kCPU), /*in_record=*/true);
  if (pool.pinned_bytes == 0) {
    kinds_.push_back({kind, records});
    records->between_passes([&](DurableTier& tier) {
      add_piece(tier.in_memory().data(), static_cast<std::int64_t>(tier.in_memory().size()), on_host);
    });
    return;
  }
  pinned_.push_back(records);
  for (const std::span<std::byte> place : places_of(*records))
    add_piece(place.data(), static_cast<std::int64_t>(place.size()), on_host);
}

void DurableFiles::take_memory(const TrainingMemory& memory, const MemoryPlan& plan,
                               const std::vector<std::unique_ptr<Unit>>& units, c10::Device device,
                               DeviceKernels* kernels) {
  kernels_ = kernels;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups)
      add_piece(group->shard, group->parameters_below.chunks.before_records() * group->element_bytes(), device);
  }
  for (const Arena* arena : {&memory.masters, &memory.optimizer}) add_piece(arena->data(), arena->taken(), device);
  const std::int64_t kept = kept_gradient_bytes(plan);  // the residuals lie behind the scratch that reductions share
  const MemoryPlace on_host(c10::Device(c10::kCPU), /*in_record=*/true);
  if (kept > 0) add_piece(memory.feedback.data() + memory.feedback.bytes() - kept, kept, on_host);
  add_records(memory.records.parameters, plan.records().parameters, "parameters");
  add_records(memory.records.states, plan.records().states, "states");
  add_records(memory.records.tensor_states, plan.records().tensor_states, "tensor_states");
  std::int64_t bytes = 0;
  for (const Piece& piece : image_.pieces) bytes += static_cast<std::int64_t>(piece.bytes.size());
  TORCH_INTERNAL_ASSERT(bytes == plan.records().image_bytes, "what a commit writes departs from the plan");
  const RecordPool& pool = plan.records().image;
  if (pool.records == 0) return;  // all training state lies in records
  FileTierOptions options;
  options.who = who_ + " durable.dir";
  options.records = pool.records;
  options.record_bytes = static_cast<std::size_t>(pool.record_bytes);
  for (std::int64_t left = bytes; left > 0; left -= pool.record_bytes)
    options.sizes.push_back(static_cast<std::size_t>(std::min(left, pool.record_bytes)));
  options.paths = {{folder_}};
  options.durable = std::filesystem::path(log_->stem()).filename().string() + "." + kImage;
  options.read_ahead = options.write_behind = static_cast<int>(plan.image_queue_depth());
  options.durable_is_there = last_.has_value();
  options.io.any_thread = true;  // any thread may complete a transfer, as for all records
  if (kernels)
    options.memory =
        pinned_memory_of(*kernels, rank_, "commits",
                         "[T0224] hint: a smaller \"record\" or \"queue_depth\" in \"offload\" needs less of it");
  image_.record_bytes = pool.record_bytes;
  image_.files = value_or_throw(FileTier::create(options));
  if (last_) throw_if_error(image_.files->protect(last_->parts[kImage]));
}

/// Calls `copy(address in the record, address in a piece, bytes, place of the piece)` for each piece of the image that
/// overlaps a record. The record begins at byte `offset` of the image.
template <class Copy>
void DurableFiles::copy_piecewise(std::int64_t offset, std::span<std::byte> record, const Copy& copy) const {
  auto skip = static_cast<std::size_t>(offset);
  std::size_t done = 0;
  for (const auto& [piece, place] : image_.pieces) {
    if (skip >= piece.size()) {
      skip -= piece.size();
      continue;
    }
    const std::size_t bytes = std::min(piece.size() - skip, record.size() - done);
    copy(record.data() + done, piece.data() + skip, bytes, place);
    skip = 0;
    done += bytes;
    if (done == record.size()) return;
  }
}

/// Fills the image's record `index` from memory. An exception of a GPU's driver is returned as an error.
absl::Status DurableFiles::copy_to(std::span<std::byte> record, std::int64_t index) const {
  try {
    copy_piecewise(index * image_.record_bytes, record,
                   [&](std::byte* in_record, const std::byte* in_piece, std::size_t bytes, MemoryPlace place) {
                     const bool on_gpu = kernels_ && !place.in_record;
                     if (on_gpu) return kernels_->fetch(in_record, in_piece, bytes);
                     std::memcpy(in_record, in_piece, bytes);
                   });
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return make_error(ExitCode::kInternal, c10::str(who_, ": what a commit holds cannot be copied: ", error.what()));
  }
}

absl::Status DurableFiles::write_image() {
  for (std::int64_t i = 0; image_.files && i < image_.files->num_records(); ++i) {
    TESSERA_ASSIGN_OR_RETURN(const std::span<std::byte> record, image_.files->get_to_overwrite(i));
    const absl::Status copied = copy_to(record, i);
    const absl::Status put =
        copied.ok() ? image_.files->put_if_changed(i) : image_.files->put(i);  // after a failed copy, `put` ends the
                                                                               // record's use; a later commit copies it
    TESSERA_RETURN_IF_ERROR(copied);
    TESSERA_RETURN_IF_ERROR(put);
  }
  return absl::OkStatus();
}

absl::Status DurableFiles::read_image() {
  for (std::int64_t i = 0; image_.files && i < image_.files->num_records(); ++i) {
    TESSERA_ASSIGN_OR_RETURN(const std::span<std::byte> record, image_.files->get(i));
    for (std::int64_t ahead = i + 1; ahead < image_.files->num_records() && ahead <= i + 4; ++ahead)
      image_.files->fetch(ahead);
    copy_piecewise(i * image_.record_bytes, record,
                   [](const std::byte* in_record, std::byte* in_piece, std::size_t bytes, MemoryPlace place) {
                     write_state(in_piece, in_record, static_cast<std::int64_t>(bytes), place);
                   });
    TESSERA_RETURN_IF_ERROR(image_.files->release(i));
  }
  return absl::OkStatus();
}

void DurableFiles::keep(std::string bytes) { to_keep_ = std::move(bytes); }

absl::StatusOr<std::string> DurableFiles::kept() const { return kept_.empty() ? std::string() : log_->kept(kept_); }

/// Writes the bytes of `keep`. It runs on the writing thread. Files of earlier commits stay, because this commit may be
/// taken back.
absl::Status DurableFiles::write_kept() {
  if (!to_keep_) return absl::OkStatus();
  if (to_keep_->empty()) {
    kept_.clear();
  } else {
    TESSERA_ASSIGN_OR_RETURN(kept_, log_->keep(*to_keep_));
  }
  to_keep_.reset();
  return absl::OkStatus();
}

void DurableFiles::begin(std::int64_t step, std::map<std::string, std::string> parts) {
  next_ = Commit{last_ ? last_->generation + 1 : 1, run_, step, layout_, std::move(parts)};
  next_->parts[kAbout] = notes_.about;
  next_->parts[kRanks] = nlohmann::json(notes_.rank_counts).dump();
  next_->parts[kWeights] = nlohmann::json(weights_).dump();
  try {
    for (const auto& records : pinned_) records->settle();
    for (const Kind& kind : kinds_) {
      kind.records->between_passes([&](DurableTier& tier) {
        throw_if_error(tier.end_writes());
        next_->parts[kind.name] = tier.where();
      });
    }
    writer_ = std::async(std::launch::async, [this] { return write(*next_); });
  } catch (...) {  // `end` reports the error, at the time at which other ranks report theirs
    std::promise<absl::Status> failed;
    failed.set_exception(std::current_exception());
    writer_ = failed.get_future();
  }
}

/// Writes the whole commit; it runs on the writing thread.
absl::Status DurableFiles::write(Commit& commit) {
  const Span span("write commit");
  TESSERA_RETURN_IF_ERROR(write_image());
  if (image_.files) {
    TESSERA_RETURN_IF_ERROR(image_.files->end_writes());
    commit.parts[kImage] = image_.files->where();
    TESSERA_RETURN_IF_ERROR(image_.files->sync());
  }
  for (const Kind& kind : kinds_) TESSERA_RETURN_IF_ERROR(kind.records->durable().sync());
  TESSERA_RETURN_IF_ERROR(write_kept());
  if (!kept_.empty()) commit.parts[kKept] = kept_;
  if (last_) TESSERA_RETURN_IF_ERROR(log_->begin());
  return log_->write(commit);
}

absl::Status DurableFiles::end() { return writer_.get(); }

absl::Status DurableFiles::take_back() { return log_->remove(std::exchange(next_, std::nullopt)->generation); }

void DurableFiles::enter_forked_process() {
  if (log_) log_->forget_lock();
}

void DurableFiles::committed() {
  if (image_.files) image_.files->committed();
  for (const Kind& kind : kinds_) kind.records->durable().committed();
  last_ = std::move(next_);
  next_.reset();
  // The parts of the commit are on the disk now. They are read from the disk if they are needed.
  last_->parts.clear();
  is_resumed_ = true;
}

absl::Status DurableFiles::bring_back() {
  for (const auto& records : pinned_) records->settle();
  if (image_.files) TESSERA_RETURN_IF_ERROR(image_.files->return_to(last_->parts[kImage]));
  for (const Kind& kind : kinds_) {
    kind.records->between_passes([&](DurableTier& tier) { throw_if_error(tier.return_to(last_->parts[kind.name])); });
  }
  TESSERA_RETURN_IF_ERROR(read_image());
  is_resumed_ = true;
  return absl::OkStatus();
}

}  // namespace tessera
