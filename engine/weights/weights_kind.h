#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A kind of file that a user may mistake for a weights file, with the remedy.
struct FileKind {
  std::string_view what;  ///< description, such as "is an HDF5 file, as Keras writes it"
  std::string_view hint;  ///< the remedy: "hint: ..."
};

/// The number of bytes at a file's beginning that `kind_of_beginning` looks at.
inline constexpr std::size_t kBytesOfBeginning = 1024;

/// Finds the kind of a file from the beginning of the file. There is always a result, also for files of no known kind.
/// open_weights calls this function for files that it cannot read.
FileKind kind_of_beginning(std::string_view beginning);

/// Finds the kind of a zip archive from the names in the archive.
FileKind kind_of_zip(const std::vector<std::string>& names);

/// Fills `to` with `bytes` bytes of a file from the position `place` on. Returns false if the file does not have these
/// bytes.
using ReadBytes = std::function<bool(std::uint64_t place, std::size_t bytes, char* to)>;

/// The largest number of names that names_in_zip reads from the directory of a zip archive. names_in_zip returns
/// nothing if there is no directory, for example because the archive's end is cut off. `bytes`: the size of the file.
inline constexpr std::size_t kMostZipNames = 10'000;
std::optional<std::vector<std::string>> names_in_zip(const ReadBytes& read, std::uint64_t bytes);

}  // namespace tessera
