#pragma once

#include <concepts>
#include <string>
#include <utility>

namespace tessera {

/// The path of a file or folder below a folder that a user named. The user's folder may be a link, or lie behind one.
/// None of the `parts` at the end of the path may be a link, since a stranger may have put it there, even while this
/// program runs. The functions of file_calls.h take their files in this form.
///
/// A path converts to the place of a file that lies directly in a user's folder (1 part). A place of 0 parts is the
/// user's folder itself.
class FilePlace {
 public:
  template <std::convertible_to<std::string> Path>
  FilePlace(Path&& path, int parts = 1) : path_(std::forward<Path>(path)), parts_(parts) {}  // NOLINT: implicit

  /// Returns the whole path, as messages and rules for faults have it.
  const std::string& path() const { return path_; }
  int parts() const { return parts_; }
  /// Returns the place of `name` in this folder.
  FilePlace operator/(const std::string& name) const { return {path_ + "/" + name, parts_ + 1}; }
  /// Returns the first of the last parts that is a link; the whole path if none is.
  std::string first_link() const;

 private:
  std::string path_;
  int parts_;
};

}  // namespace tessera
