#include "offload/files/unsynced_files.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "offload/files/file_place.h"

namespace tessera {

void UnsyncedFiles::wrote(const std::string& path) {
  const MutexLock lock(mutex_);
  if (std::ranges::find(unsynced_, path) == unsynced_.end()) unsynced_.push_back(path);
}

void UnsyncedFiles::synced_file(const std::string& path) {
  const MutexLock lock(mutex_);
  std::erase(unsynced_, path);
}

void UnsyncedFiles::synced_folder(const std::string& folder) {
  const MutexLock lock(mutex_);
  std::erase_if(renames_, [&](const Rename& rename) {
    if (folder_of_file(rename.to) != folder) return false;
    if (!rename.before.empty()) ::unlink(rename.before.c_str());
    return true;
  });
}

void UnsyncedFiles::before_rename(const std::string& from, const std::string& to) {
  const MutexLock lock(mutex_);
  replaced_ = to + ".before-rename";
  ::unlink(replaced_.c_str());
  if (::link(to.c_str(), replaced_.c_str()) != 0) replaced_.clear();
}

void UnsyncedFiles::renamed(const std::string& from, const std::string& to) {
  const MutexLock lock(mutex_);
  renames_.push_back({from, to, replaced_});
  for (std::string& path : unsynced_) {
    const bool lies_inside = path.starts_with(from + "/");
    if (path == from || lies_inside) path.replace(0, from.size(), to);
  }
}

void UnsyncedFiles::unlinked(const std::string& path) {
  const MutexLock lock(mutex_);
  std::erase(unsynced_, path);
}

void UnsyncedFiles::drop(bool keep_renames) {
  const MutexLock lock(mutex_);
  for (const std::string& path : unsynced_) {
    if (::truncate(path.c_str(), 0) != 0) std::perror("power loss: truncate");
  }
  for (auto at = renames_.rbegin(); at != renames_.rend(); ++at) {
    const Rename& rename = *at;
    if (!keep_renames) {
      std::rename(rename.to.c_str(), rename.from.c_str());
      if (!rename.before.empty()) std::rename(rename.before.c_str(), rename.to.c_str());
    } else if (!rename.before.empty()) {
      ::unlink(rename.before.c_str());
    }
  }
}

}  // namespace tessera
