#pragma once

#include <string>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

/// A model, for tests, of the data that a power loss would destroy. The functions of `file_calls.h` update it while a
/// plan with a rule kDropUnsynced is installed.
///
/// 1. A file that was written and was not synced afterwards loses all its content.
/// 2. A rename whose folder was not synced afterwards is undone: the old file is there again under its name.
///    If renames are kept, only the data is lost, as on file systems that do not order writes and renames.
/// 3. Synced data is kept.
///
/// This class keeps a link to the file that a rename replaces, so that the rename can be undone. The link is in the
/// same folder (NAME.before-rename), and is removed when the folder is synced. The class is thread-safe.
class UnsyncedFiles {
 public:
  /// Each function reports a change that was made, except before_rename, which reports a rename that will be made next.
  void wrote(const std::string& path);
  void synced_file(const std::string& path);
  void synced_folder(const std::string& folder);
  void before_rename(const std::string& from, const std::string& to);
  void renamed(const std::string& from, const std::string& to);
  void unlinked(const std::string& path);

  /// Simulates the power loss: undoes all changes that were not synced.
  void drop(bool keep_renames);

 private:
  struct Rename {
    std::string from, to;
    std::string before;  ///< link to the replaced file; empty if no file was replaced
  };

  Mutex mutex_;
  std::vector<std::string> unsynced_ ABSL_GUARDED_BY(mutex_);
  std::vector<Rename> renames_ ABSL_GUARDED_BY(mutex_);
  std::string replaced_ ABSL_GUARDED_BY(mutex_);  ///< the link that before_rename made, for use by `renamed`
};

}  // namespace tessera
