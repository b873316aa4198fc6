#pragma once

#include <absl/status/status.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/existing.h"

namespace tessera::app {

/// A file that the command line names, with its option: "--metrics".
struct NamedPath {
  std::string option;
  std::filesystem::path path;
  std::vector<std::string> extensions = {};  ///< extensions of the files that are read in an input folder; empty: all
};

/// Makes sure, before any work is done, that every output can be written and that no output destroys anything. It makes
/// missing folders. It also creates and removes a file beside each output, so that a full disk or a missing permission
/// is found now. An empty path means that the output is not wanted.
///
/// | output                                                                     | code   |
/// |----------------------------------------------------------------------------|--------|
/// | is an input, lies in an input folder, or is another output                 | 64     |
/// | is a folder, device, pipe or symbolic link                                 | 73     |
/// | exists, or "<path>.partial" exists, and files are not replaced             | 73     |
/// | cannot be created, or its disk is full                                     | 73     |
/// | permission is missing                                                      | 77     |
absl::Status check_outputs(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs,
                           Existing existing);

/// Writes `bytes` as an OutputFile does (offload/files/output_file.h). Messages begin with `what`. Errors: 73 if the
/// file cannot be created, 77 if permission is missing, 74 if it cannot be written. Existing::kReplaced is used for
/// `--overwrite`, and for a job that a launcher starts again.
absl::Status write_output(const std::filesystem::path& path, std::string_view bytes, Existing existing,
                          const std::string& what);

}  // namespace tessera::app
