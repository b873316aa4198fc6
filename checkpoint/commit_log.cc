#include "checkpoint/commit_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "checkpoint/files/hash.h"
#include "checkpoint/files/regular_file.h"
#include "offload/files/atomic_file.h"
#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostCommitBytes = std::int64_t{1} << 36;

std::string stem_of(const std::string& folder, int rank) { return fmt::format("{}/rank-{:05}", folder, rank); }

std::string commit_file(const std::string& stem, std::int64_t generation) {
  return stem + (generation % 2 == 0 ? ".commit-0" : ".commit-1");
}

/// The beginning of the name of a kept file. The hash of the file's content follows it.
constexpr std::string_view kKept = "kept-";

/// Returns the name of the lock file, which stays when its run ends.
std::string lock_file(const std::string& stem) { return stem + ".lock"; }

/// Returns the name of the marker file, which is empty.
std::string begun_file(const std::string& stem) { return stem + ".begun"; }

absl::Status log_failure(const std::string& who, const char* operation, const std::string& path, int error) {
  return file_error({.who = who, .operation = operation, .file = path, .error = error});
}

}  // namespace

absl::StatusOr<std::unique_ptr<CommitLog>> CommitLog::open(const std::string& folder, int rank,
                                                           const std::string& who) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  TESSERA_RETURN_IF_ERROR(make_folders(folder, who));
  const std::string stem = stem_of(folder, rank);
  // A run that is being killed may take a while to end.
  TESSERA_ASSIGN_OR_RETURN(FolderLock lock, FolderLock::take(lock_file(stem), "commits its steps to " + folder, who,
                                                             std::chrono::seconds(3)));
  return std::unique_ptr<CommitLog>(new CommitLog(folder, stem, who, std::move(lock)));
}

std::string CommitLog::file_of(std::int64_t generation) const { return commit_file(stem_, generation); }

bool CommitLog::was_opened(const std::string& folder, int rank) {
  std::error_code ignored;
  return fs::exists(lock_file(stem_of(folder, rank)), ignored);
}

int CommitLog::ranks_in(const std::string& folder) {
  int ranks = 0;
  const auto has_commit = [&](std::int64_t generation) {
    std::error_code ignored;
    return fs::exists(commit_file(stem_of(folder, ranks), generation), ignored);
  };
  while (has_commit(0) || has_commit(1)) ++ranks;
  return ranks;
}

bool CommitLog::has_begun() const {
  std::error_code ignored;
  return fs::exists(begun_file(stem_), ignored);
}

absl::StatusOr<std::vector<int>> begun_ranks(const std::string& folder, const std::string& who) {
  std::vector<std::string> names;
  if (const int got = file_calls::list_folder(FilePlace(folder, 0), names); got < 0)
    return log_failure(who, "list", folder, -got);
  std::vector<int> ranks;
  for (const std::string& name : names) {
    int rank = 0;
    if (std::sscanf(name.c_str(), "rank-%9d", &rank) == 1 && folder + "/" + name == begun_file(stem_of(folder, rank)))
      ranks.push_back(rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

absl::Status CommitLog::begin() const {
  return has_begun() ? absl::OkStatus() : write_file_atomically(begun_file(stem_), {}, who_);
}

absl::Status CommitLog::remove_all(const std::string& folder, const std::string& who) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  std::vector<std::string> names;
  if (const int got = file_calls::list_folder(FilePlace(folder, 0), names); got < 0)
    return log_failure(who, "list", folder, -got);
  std::erase_if(names, [](const std::string& name) { return !name.starts_with("rank-") || name.ends_with(".lock"); });
  std::ranges::sort(names);
  for (const std::string& name : names) {
    const FilePlace file = FilePlace(folder, 0) / name;
    if (const int got = file_calls::unlink(file); got < 0 && got != -ENOENT)
      return log_failure(who, "unlink", file.path(), -got);
  }
  return absl::OkStatus();
}

/// Removes this rank's files for which `is_meant` returns true. `is_meant` gets the part of a name behind the stem and
/// a dot.
absl::Status CommitLog::remove_files(const std::function<bool(std::string_view end)>& is_meant) const {
  const std::string begin = fs::path(stem_).filename().string() + ".";
  std::vector<std::string> names;
  if (const int got = file_calls::list_folder(FilePlace(folder_, 0), names); got < 0)
    return log_failure(who_, "list", folder_, -got);
  for (const std::string& name : names) {
    if (!name.starts_with(begin) || !is_meant(std::string_view(name).substr(begin.size()))) continue;
    const std::string path = folder_ + "/" + name;
    if (const int got = file_calls::unlink(path); got < 0 && got != -ENOENT)
      return log_failure(who_, "unlink", path, -got);
  }
  return absl::OkStatus();
}

absl::Status CommitLog::remove_leftovers() const {
  return remove_files([](std::string_view end) { return end.find(".tmp-") != std::string_view::npos; });
}

std::string CommitLog::kept_file(const std::string& hash) const { return fmt::format("{}.{}{}", stem_, kKept, hash); }

absl::StatusOr<std::string> CommitLog::keep(std::string_view bytes) const {
  const std::string hash = hash_text(checkpoint_hash(bytes));
  TESSERA_RETURN_IF_ERROR(write_file_atomically(kept_file(hash), std::as_bytes(std::span(bytes)), who_));
  return hash;
}

absl::StatusOr<std::string> CommitLog::kept(const std::string& hash) const {
  const std::string path = kept_file(hash);
  absl::StatusOr<std::string> bytes = read_regular_text(path, kMostCommitBytes, who_);
  const bool is_missing = !bytes.ok() && exit_code_of(bytes.status()) == ExitCode::kNoInput;
  if (!bytes.ok() && !is_missing) return bytes.status();
  if (bytes.ok() && hash_text(checkpoint_hash(*bytes)) == hash) return bytes;
  return make_error(
      ExitCode::kCorruptData,
      fmt::format("{}: {} is {}, and the commit wants what it held when it was made. [T0068] hint: put the file back, "
                  "if there is a copy; or load a checkpoint in a run with another durable.dir",
                  who_, path, is_missing ? "missing" : "damaged"));
}

absl::Status CommitLog::remove_kept_but(const std::string& hash) const {
  return remove_files([&](std::string_view end) { return end.starts_with(kKept) && end.substr(kKept.size()) != hash; });
}

absl::StatusOr<std::vector<Commit>> CommitLog::read() const {
  std::vector<Commit> commits;
  std::vector<std::string> damaged;
  for (const std::int64_t which : {0, 1}) {
    const std::string path = file_of(which);
    const absl::StatusOr<std::string> text = read_regular_text(path, kMostCommitBytes, who_);
    if (!text.ok() && exit_code_of(text.status()) == ExitCode::kNoInput) continue;
    TESSERA_RETURN_IF_ERROR(text.status());
    absl::StatusOr<Commit> commit = read_commit(path, *text);
    if (commit.ok() && commit->generation % 2 != which)
      commit =
          make_error(ExitCode::kCorruptData, path +
                                                 ": it holds the other file's commit. [T0069] hint: was it renamed? "
                                                 "Where no other commit is whole, remove the folder to begin anew");
    if (commit.ok()) {
      commits.push_back(*std::move(commit));
    } else {
      damaged.push_back(message_of(commit.status()));
    }
  }
  if (commits.empty() && (!damaged.empty() || has_begun())) return no_whole_commit(damaged);
  for (const std::string& what : damaged) log_warning(who_ + ": " + what + ". The commit before it is looked for");
  std::ranges::sort(commits, {}, &Commit::generation);
  return commits;
}

absl::Status CommitLog::no_whole_commit(const std::vector<std::string>& damaged) const {
  std::string text = who_ + ": durable.dir " + folder_ + " is of a run, and has no whole commit of it";
  for (const std::string& what : damaged) text += "; " + what;
  if (damaged.empty()) text += "; " + file_of(0) + " and " + file_of(1) + " are missing";
  return make_error(ExitCode::kCorruptData,
                    text +
                        ". Nothing in it was changed. [T0070] hint: put the files back, if there is a copy; to begin "
                        "anew, remove the folder on every host, or name another one");
}

absl::Status CommitLog::write(const Commit& commit) const {
  const std::string bytes = write_commit(commit);
  return write_file_atomically(file_of(commit.generation), std::as_bytes(std::span(bytes)), who_);
}

absl::Status CommitLog::remove(std::int64_t generation) const {
  const std::string path = file_of(generation);
  const int got = file_calls::unlink(path);
  if (got == -ENOENT) return absl::OkStatus();
  if (got < 0) return log_failure(who_, "unlink", path, -got);
  const char* operation = "fsync";
  const int synced = file_calls::sync_folder_of(path, operation);
  return synced < 0 ? log_failure(who_, operation, folder_, -synced) : absl::OkStatus();
}

}  // namespace tessera
