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

/// What somebody took for a file of weights: kinds that are no files of weights, each with its remedy.
struct FileKind {
  std::string_view what;  ///< "is an HDF5 file, as Keras writes it"
  std::string_view hint;  ///< "hint: ..."
};

/// As many bytes of a file's beginning as `kind_of_beginning` looks at.
inline constexpr std::size_t kBytesOfBeginning = 1024;

/// By how the file begins. It always has an answer: a file of no known kind is one that is not known.
FileKind kind_of_beginning(std::string_view beginning);

/// The same for a zip archive, by the names in it.
FileKind kind_of_zip(const std::vector<std::string>& names);

/// Fills `to` with bytes of a file from `place` on; false where it has no such bytes.
using ReadBytes = std::function<bool(std::uint64_t place, std::size_t bytes, char* to)>;

/// The names in a zip archive's directory, at most kMostZipNames of them; nothing where it has none, as when the
/// archive's end is cut off.
inline constexpr std::size_t kMostZipNames = 10'000;
std::optional<std::vector<std::string>> names_in_zip(const ReadBytes& read, std::uint64_t bytes);

}  // namespace tessera
