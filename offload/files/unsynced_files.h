#pragma once

#include <string>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

/// Models for tests what a power loss would take away. It is kept up to date by `file_calls.h` while a plan with a rule
/// kDropUnsynced is installed.
///
/// 1. A file that was written and not synced since loses all its content.
/// 2. A rename whose folder was not synced since is undone: the old file is there again under its name.
///    Where renames are kept, only the data is lost,
///    as on file systems that order nothing.
/// 3. Synced data stays.
///
/// This class keeps a link to the file that a rename replaces, in the same folder (NAME.before-rename), so that the
/// rename can be undone; the link is removed when the folder is synced. It is thread-safe.
class UnsyncedFiles {
 public:
  /// Each function reports a change that was made; before_rename reports one that is about to be made.
  void wrote(const std::string& path);
  void synced_file(const std::string& path);
  void synced_folder(const std::string& folder);
  void before_rename(const std::string& from, const std::string& to);
  void renamed(const std::string& from, const std::string& to);
  void unlinked(const std::string& path);

  /// The power loss itself: undoes everything that was not synced.
  void drop(bool keep_renames);

 private:
  struct Rename {
    std::string from, to;
    std::string before;  ///< link to the replaced file; empty if none was replaced
  };

  Mutex mutex_;
  std::vector<std::string> unsynced_ ABSL_GUARDED_BY(mutex_);
  std::vector<Rename> renames_ ABSL_GUARDED_BY(mutex_);
  std::string replaced_ ABSL_GUARDED_BY(mutex_);  ///< link that before_rename made; `renamed` uses it
};

}  // namespace tessera
