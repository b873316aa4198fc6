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

/// A kind of file that a user may take for a weights file, although it is none, with its remedy.
struct FileKind {
  std::string_view what;  ///< "is an HDF5 file, as Keras writes it"
  std::string_view hint;  ///< "hint: ..."
};

/// The number of bytes at a file's beginning that `kind_of_beginning` looks at.
inline constexpr std::size_t kBytesOfBeginning = 1024;

/// Says what a file is by how it begins. It always has an answer, for files of no known kind too. open_weights calls it
/// for files that it cannot read.
FileKind kind_of_beginning(std::string_view beginning);

/// Says what a zip archive is, by the names in it.
FileKind kind_of_zip(const std::vector<std::string>& names);

/// Fills `to` with `bytes` bytes of a file from `place` on; returns false where the file has no such bytes.
using ReadBytes = std::function<bool(std::uint64_t place, std::size_t bytes, char* to)>;

/// The largest number of names that names_in_zip reads from the directory of a zip archive. That function returns
/// nothing if there is no directory, for example if the archive's end is cut off. `bytes` is the file's size.
inline constexpr std::size_t kMostZipNames = 10'000;
std::optional<std::vector<std::string>> names_in_zip(const ReadBytes& read, std::uint64_t bytes);

}  // namespace tessera
