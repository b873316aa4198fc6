#include "checkpoint/checkpoint_folder.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "checkpoint/files/regular_file.h"
#include "checkpoint/manifest.h"
#include "offload/files/atomic_file.h"
#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "offload/files/retries.h"
#include "runtime/base/hint.h"
#include "runtime/base/input_file.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-", kUnfinished = ".tmp-";
constexpr const char* kLatest = "latest";
constexpr const char* kBest = "best";
constexpr std::int64_t kMostLatestBytes = 4096;
constexpr int kMostGenerations = 1000;
// This file commits, finds and prunes checkpoints.
//
// A save begins in a folder "step-N.tmp-PID-NUMBER" under the folder's lock (`begin`, which first removes the files
// that killed saves left). `commit` writes the manifest there, syncs, renames the folder to its final name, and then
// replaces the one-line files `latest` and `best`. Readers look only at committed names. `list_checkpoints` orders
// checkpoints by the time of their manifests, `named_checkpoint` follows a pointer, and `find_checkpoint` finds the
// checkpoint for a user's path. `prune` only renames; `remove_pruned` deletes later, without the lock.

constexpr std::size_t kNamedCheckpoints = 10;

/// Returns the step in "step-000000000100" or "step-000000000100.2"; nothing for other names.
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix) || !is_plain_name(name)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::int64_t step = 0, generation = 0;
  const char* const last = name.data() + name.size();
  auto [end, error] = std::from_chars(name.data(), last, step);
  if (error != std::errc() || step < 0) return std::nullopt;
  if (end == last) return step;
  if (*end != '.') return std::nullopt;
  const auto rest = std::from_chars(end + 1, last, generation);
  return rest.ec == std::errc() && rest.ptr == last && generation > 0 ? std::optional(step) : std::nullopt;
}

std::string name_of(std::int64_t step, int generation) {
  const std::string name = fmt::format("{}{:012}", kPrefix, step);
  return generation == 0 ? name : fmt::format("{}.{}", name, generation);
}

bool is_there(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

absl::Status failed(const std::string& who, const char* operation, const std::string& path, int error) {
  return file_error({.who = who,
                     .operation = operation,
                     .file = path,
                     .folder = fs::path(path).parent_path().string(),
                     .error = error});
}

absl::StatusOr<std::vector<std::string>> names_in(const FilePlace& folder, const std::string& who) {
  std::vector<std::string> names;
  if (const int got = file_calls::list_folder(folder, names); got < 0)
    return input_error(folder.path(), who + ":", "cannot be listed", -got);
  return names;
}

/// Returns the place of a folder that a user named.
FilePlace users(const std::string& folder) { return {folder, 0}; }

/// Syncs the folder of a file that was renamed.
absl::Status sync_folder_of(const FilePlace& file, const std::string& folder, const std::string& who) {
  const char* operation = nullptr;
  const int got = file_calls::sync_folder_of(file, operation);
  return got == 0 ? absl::OkStatus() : failed(who, operation, folder, -got);
}

/// Removes a folder of files in the user's folder. The manifest is removed first, so that files that remain after a
/// failure are not a checkpoint. The function tries to remove all files, and reports the first failure.
absl::Status remove_tree(const FilePlace& tree, const std::string& who) {
  absl::Status status;
  const auto note = [&](int got, const FilePlace& what) {
    if (got == -EISDIR && status.ok())
      status = make_error(ExitCode::kCannotCreate,
                          who + ": " + what.path() +
                              " is a folder, and no save makes one there. [T0064] hint: it is somebody else's; "
                              "move it away, and save again");
    if (got < 0 && got != -ENOENT && status.ok()) status = failed(who, "removal", what.path(), -got);
  };
  if (const int got = file_calls::check_folder(tree); got == -ENOTDIR || got == -ELOOP) {
    note(file_calls::unlink(tree), tree);
    return status;
  }
  const FilePlace manifest = tree / "manifest.json";
  note(retried([&] { return file_calls::unlink(manifest); }), manifest);
  const absl::StatusOr<std::vector<std::string>> names = names_in(tree, who);
  if (!names.ok()) return is_there(tree.path()) ? names.status() : status;  // else another process has removed it
  for (const std::string& name : *names) {
    const FilePlace file = tree / name;
    note(retried([&] { return file_calls::unlink(file); }), file);
  }
  note(retried([&] { return file_calls::remove_folder(tree); }), tree);
  return status;
}

std::string text_of(const std::vector<ListedCheckpoint>& checkpoints) {
  std::vector<std::string> names;
  for (const ListedCheckpoint& checkpoint : checkpoints) names.push_back(checkpoint.name);
  if (names.empty()) return "none";
  const std::size_t more = names.size() > kNamedCheckpoints ? names.size() - kNamedCheckpoints : 0;
  names.erase(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(more));
  return joined(names) + (more > 0 ? fmt::format(" and {} older ones", more) : "");
}

}  // namespace

absl::StatusOr<std::vector<ListedCheckpoint>> list_checkpoints(const std::string& folder, const std::string& who) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names, names_in(users(folder), who));
  struct Found {
    std::int64_t seconds, nanoseconds;
    ListedCheckpoint checkpoint;
    auto order() const { return std::tie(seconds, nanoseconds, checkpoint.step, checkpoint.name); }
  };
  std::vector<Found> found;
  for (const std::string& name : names) {
    const std::optional<std::int64_t> step = step_of(name);
    struct stat info {};
    // The manifest is the last file that is written, and nothing in a committed checkpoint changes, so the time of
    // manifests orders checkpoints.
    if (!step || ::lstat((folder + "/" + name + "/manifest.json").c_str(), &info) != 0) continue;
    found.push_back({info.st_mtim.tv_sec, info.st_mtim.tv_nsec, {name, *step}});
  }
  std::ranges::sort(found, [](const Found& a, const Found& b) { return a.order() < b.order(); });
  std::vector<ListedCheckpoint> checkpoints;
  for (Found& each : found) checkpoints.push_back(std::move(each.checkpoint));
  return checkpoints;
}

absl::StatusOr<std::vector<std::string>> damaged_checkpoints(const std::string& folder, const std::string& who) {
  TESSERA_ASSIGN_OR_RETURN(std::vector<std::string> names, names_in(users(folder), who));
  std::erase_if(names, [&](const std::string& name) {
    return !step_of(name) || is_there(folder + "/" + name + "/manifest.json");
  });
  std::ranges::sort(names);
  return names;
}

namespace {

/// Returns the checkpoint that the single line of `folder`/`pointer` names.
absl::StatusOr<std::string> named_checkpoint(const std::string& folder, const char* pointer, const std::string& who) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<ListedCheckpoint> there, list_checkpoints(folder, who));
  const std::string path = folder + "/" + pointer, there_are = text_of(there),
                    hint = ". [T0065] hint: name a checkpoint itself; there are: " + there_are;
  absl::StatusOr<std::string> name = read_regular_text(path, kMostLatestBytes, who);
  if (!name.ok()) {
    const std::string why = message_of(name.status());
    return make_error(exit_code_of(name.status()),
                      why + (has_hint(why) ? "; or name a checkpoint itself; there are: " + there_are : hint));
  }
  if (name->ends_with('\n')) name->pop_back();
  if (!step_of(*name))
    return make_error(ExitCode::kCorruptData,
                      who + ": " + path + " holds " + quoted_text(*name) + ", which is no name of a checkpoint" + hint);
  if (std::ranges::find(there, *name, &ListedCheckpoint::name) == there.end())
    return make_error(ExitCode::kNoInput, who + ": " + path + " names " + *name + ", which is not there" + hint);
  return *name;
}

}  // namespace

absl::StatusOr<std::string> latest_checkpoint(const std::string& folder, const std::string& who) {
  return named_checkpoint(folder, kLatest, who);
}

absl::StatusOr<std::string> best_checkpoint(const std::string& folder, const std::string& who) {
  return named_checkpoint(folder, kBest, who);
}

absl::StatusOr<std::string> find_checkpoint(const std::string& path, const std::string& who) {
  if (is_there(path + "/manifest.json")) return path;
  if (const fs::path pointer(path); pointer.filename() == kBest && !fs::is_directory(pointer)) {
    const std::string folder = pointer.has_parent_path() ? pointer.parent_path().string() : ".";
    TESSERA_ASSIGN_OR_RETURN(const std::string name, best_checkpoint(folder, who));
    return folder + "/" + name;
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string name, latest_checkpoint(path, who));
  return path + "/" + name;
}

absl::StatusOr<FolderLock> lock_for_run(const std::string& folder, const std::string& who) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return failed(who, "create", folder, error.value());
  // This call waits for the lock, since a run that is being killed may take a while to end.
  return FolderLock::take(folder + "/run.lock", "trains with checkpoints in " + folder, who, std::chrono::seconds(3));
}

absl::StatusOr<std::unique_ptr<UnfinishedCheckpoint>> UnfinishedCheckpoint::begin(const std::string& folder,
                                                                                  std::int64_t step,
                                                                                  const std::string& who) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  if (folder.empty())
    return make_error(ExitCode::kConfig,
                      who + ": the path of the folder for checkpoints is empty. [T0066] hint: name one");
  TESSERA_RETURN_IF_ERROR(make_folders(folder, who));
  std::unique_ptr<UnfinishedCheckpoint> checkpoint(new UnfinishedCheckpoint(folder, who));
  TESSERA_ASSIGN_OR_RETURN(checkpoint->lock_,
                           FolderLock::take(folder + "/lock", "saves a checkpoint to " + folder, who));
  TESSERA_RETURN_IF_ERROR(checkpoint->remove_leftovers());
  // A committed checkpoint is never replaced: a run that reaches the same step again uses a name with a higher number
  // at its end.
  int generation = 0;
  while (generation < kMostGenerations && is_there(folder + "/" + name_of(step, generation))) ++generation;
  checkpoint->name_ = name_of(step, generation);
  static std::atomic<std::uint64_t> numbers{0};
  checkpoint->path_ =
      fmt::format("{}/{}{}{}-{}", folder, checkpoint->name_, kUnfinished, ::getpid(), numbers.fetch_add(1));
  int got = checkpoint->spare_.take();
  if (got == 0) got = retried([&] { return file_calls::make_folder(checkpoint->path_, 0700); });
  if (got < 0) return failed(who, "create", checkpoint->path_, -got);
  checkpoint->exists_ = true;
  return checkpoint;
}

absl::Status UnfinishedCheckpoint::remove_leftovers() const {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names, names_in(users(folder_), who_));
  for (const std::string& name : names) {
    const std::size_t end = name.find(kUnfinished);
    const bool is_ours = end != std::string::npos && (step_of(name.substr(0, end)) || name.substr(0, end) == kLatest ||
                                                      name.substr(0, end) == kBest);
    if (!is_ours) continue;
    log_info(who_ + ": removes " + folder_ + "/" + name + ", which a process that was killed has left");
    TESSERA_RETURN_IF_ERROR(remove_tree(folder_ + "/" + name, who_));
  }
  return absl::OkStatus();
}

UnfinishedCheckpoint::~UnfinishedCheckpoint() {
  spare_.give_back();
  if (exists_) {
    absl::Status status = remove_tree(path_, who_);
    if (!status.ok()) status = remove_tree(path_, who_);  // a fault plan may have made the first attempt fail
    if (!status.ok()) log_warning(message_of(status));
  }
}

absl::StatusOr<std::string> UnfinishedCheckpoint::commit(const std::string& manifest, bool is_best) {
  spare_.give_back();
  // This write syncs the folder too, and thereby the names of all its files.
  TESSERA_RETURN_IF_ERROR(
      write_file_atomically(FilePlace(path_) / "manifest.json", std::as_bytes(std::span(manifest)), who_));
  const std::string committed = committed_path();
  const int got = retried([&] { return file_calls::rename(path_, committed); });
  if (got < 0) return failed(who_, "rename", committed, -got);
  exists_ = false;
  // A link that took the folder's place after the manifest was written has been renamed too.
  if (const int there = file_calls::check_folder(committed); there < 0)
    return failed(who_, "rename", committed, -there);
  absl::Status status = sync_folder_of(committed, folder_, who_);
  const std::string line = name_ + "\n";
  for (const char* const pointer : {kLatest, kBest}) {
    if (pointer == kBest && !is_best) continue;
    if (status.ok()) status = write_file_atomically(folder_ + "/" + pointer, std::as_bytes(std::span(line)), who_);
  }
  if (!status.ok())
    return make_error(exit_code_of(status), message_of(status) + ". The checkpoint " + committed +
                                                " is whole, but a power loss might undo it, and " + folder_ +
                                                "/latest may name an earlier one" + (is_best ? ", as may best" : ""));
  return committed;
}

absl::Status UnfinishedCheckpoint::prune(std::int64_t keep, std::vector<std::string>& pruned) const {
  TESSERA_ASSIGN_OR_RETURN(std::vector<ListedCheckpoint> there, list_checkpoints(folder_, who_));
  TESSERA_ASSIGN_OR_RETURN(const std::string latest, latest_checkpoint(folder_, who_));
  std::string best;
  if (is_there(folder_ + "/" + kBest)) {
    TESSERA_ASSIGN_OR_RETURN(best, best_checkpoint(folder_, who_));
    std::erase_if(there, [&](const ListedCheckpoint& checkpoint) {
      return checkpoint.name == best && checkpoint.name != latest;
    });
  }
  auto left = static_cast<std::int64_t>(there.size());
  for (const ListedCheckpoint& checkpoint : there) {
    if (left <= std::max<std::int64_t>(keep, 1)) break;
    if (checkpoint.name == latest || checkpoint.name == best) continue;
    // A checkpoint that is partly removed is recognised by this name.
    const std::string path = folder_ + "/" + checkpoint.name, gone = path + std::string(kUnfinished) + "pruned";
    const int got = retried([&] { return file_calls::rename(path, gone); });
    if (got < 0) return failed(who_, "rename", gone, -got);
    pruned.push_back(gone);
    --left;
  }
  return pruned.empty() ? absl::OkStatus() : sync_folder_of(pruned.back(), folder_, who_);
}

absl::Status remove_pruned(const std::vector<std::string>& paths, const std::string& who) {
  absl::Status status;
  for (const std::string& path : paths) status.Update(remove_tree(path, who));
  return status;
}

absl::Status remove_checkpoints(const FilePlace& folder, const std::string& who) {
  if (!is_there(folder.path())) return absl::OkStatus();
  const FilePlace latest = folder / kLatest;
  if (const int got = retried([&] { return file_calls::unlink(latest); }); got < 0 && got != -ENOENT)
    return failed(who, "removal", latest.path(), -got);
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names, names_in(folder, who));
  for (const std::string& name : names) TESSERA_RETURN_IF_ERROR(remove_tree(folder / name, who));
  const int got = retried([&] { return file_calls::remove_folder(folder); });
  return got < 0 ? failed(who, "removal", folder.path(), -got) : absl::OkStatus();
}

}  // namespace tessera
