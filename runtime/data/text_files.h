#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <vector>

#include "runtime/data/mapped_file.h"

namespace tessera {

/// Opens a file of text, or the files of a directory that have one of `extensions` (empty: any), in the order of their
/// paths' bytes. Empty files are left out. Hidden files and folders (".git") are left out; symbolic links to folders
/// are not followed. Errors are those of MappedFile, and 65 if all files are empty.
absl::StatusOr<std::vector<MappedFile>> open_text_files(const std::filesystem::path& path,
                                                        const std::vector<std::string>& extensions);

}  // namespace tessera
