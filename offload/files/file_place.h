#pragma once

#include <concepts>
#include <filesystem>
#include <string>
#include <utility>

namespace tessera {

/// Returns the folder of a file; "." for a name alone.
inline std::string folder_of_file(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// The path of a file or folder below a folder that a user named. The user's folder may be a link, or its path may
/// contain links. None of the last `parts` names of the path may be a link, since a stranger may have put it there,
/// even while this program runs. The functions of file_calls.h take their files in this form.
///
/// A path converts to the place of a file that lies directly in a user's folder (1 part). A place of 0 parts is the
/// user's folder itself.
class FilePlace {
 public:
  template <std::convertible_to<std::string> Path>
  FilePlace(Path&& path, int parts = 1) : path_(std::forward<Path>(path)), parts_(parts) {}  // NOLINT: implicit

  /// Returns the whole path, as it appears in messages and in rules for faults.
  const std::string& path() const { return path_; }
  int parts() const { return parts_; }
  /// Returns the place of `name` in this folder.
  FilePlace operator/(const std::string& name) const { return {path_ + "/" + name, parts_ + 1}; }
  /// Returns the path of the first link among the last `parts`, or the whole path if none of them is a link.
  std::string first_link() const;

 private:
  std::string path_;
  int parts_;
};

}  // namespace tessera
