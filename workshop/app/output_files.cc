#include "workshop/app/output_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>

#include "offload/files/output_file.h"
#include "runtime/base/status.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;

/// Returns the information of lstat about a path, without following symbolic links; nothing if the path is free.
absl::StatusOr<std::optional<struct stat>> look_at(const NamedPath& output, const fs::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) return std::optional(info);
  if (errno == ENOENT) return std::optional<struct stat>();
  return cannot_create(output.option + " " + path.string(), errno);
}

const char* kind_of(mode_t mode) {
  if (S_ISLNK(mode)) return "is a symbolic link, and results are not written through links";
  if (S_ISDIR(mode)) return "is a directory";
  if (S_ISREG(mode)) return nullptr;
  return "is a device or a pipe";
}

bool is_same(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

/// Returns the absolute path with links of its folders resolved, whether the file is there or not.
fs::path resolved(const fs::path& path) {
  std::error_code error;
  fs::path folder = fs::weakly_canonical(fs::absolute(path, error).parent_path(), error);
  return error ? fs::absolute(path, error) : folder / path.filename();
}

bool lies_in(const fs::path& path, const fs::path& folder) {
  std::error_code error;
  const fs::path inside = resolved(path), outside = fs::weakly_canonical(folder, error);
  const auto [end, ignored] = std::mismatch(outside.begin(), outside.end(), inside.begin(), inside.end());
  return !error && end == outside.end();
}

/// Returns whether a file of this name would count as a file of the input folder.
bool counts_in(const fs::path& path, const NamedPath& folder) {
  return folder.extensions.empty() || std::find(folder.extensions.begin(), folder.extensions.end(),
                                                path.extension().string()) != folder.extensions.end();
}

absl::Status check_against_input(const NamedPath& output, const std::optional<struct stat>& there,
                                 const NamedPath& input) {
  struct stat info {};
  // A missing input is reported by the code that reads it.
  if (input.path.empty() || ::stat(input.path.c_str(), &info) != 0) return absl::OkStatus();
  const std::string both =
      output.option + " " + output.path.string() + " and " + input.option + " " + input.path.string();
  if (there && is_same(*there, info))
    return make_error(ExitCode::kUsage, both + " are the same file, which would be replaced. [T0021] hint: give " +
                                            output.option + " another name");
  if (S_ISDIR(info.st_mode) && counts_in(output.path, input) && lies_in(output.path, input.path))
    return make_error(ExitCode::kUsage, both + ": the output would lie among the input's files. [T0022] hint: give " +
                                            output.option + " another folder");
  return absl::OkStatus();
}

/// Checks the path itself, and the path under which the file is first written.
absl::Status check_place(const NamedPath& output, const std::vector<NamedPath>& inputs, Existing existing) {
  for (const fs::path& path : {output.path, partial_of(output.path)}) {
    TESSERA_ASSIGN_OR_RETURN(const std::optional<struct stat> there, look_at(output, path));
    for (const NamedPath& input : inputs)
      TESSERA_RETURN_IF_ERROR(check_against_input({output.option, path, {}}, there, input));
    if (!there) continue;
    const std::string name = output.option + " " + path.string();
    if (const char* kind = kind_of(there->st_mode))
      return make_error(ExitCode::kCannotCreate, name + " " + kind + ". [T0023] hint: name a file that may be created");
    if (existing == Existing::kKept)
      return make_error(
          ExitCode::kCannotCreate,
          name + " exists already, and is kept. [T0024] hint: --overwrite replaces it; another name keeps both");
  }
  return absl::OkStatus();
}

absl::Status make_folder(const NamedPath& output) {
  std::error_code error;
  const fs::path folder = output.path.parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  return error ? cannot_create(output.option + ": cannot create the folder " + folder.string(), error.value())
               : absl::OkStatus();
}

/// Creates a file beside the output, writes a byte, and removes the file.
absl::Status try_place(const NamedPath& output) {
  const fs::path partial = partial_of(output.path);
  const std::string what = output.option + ": cannot create " + partial.string();
  const int fd = create_partial(partial);
  if (fd < 0) return cannot_create(what, errno);
  absl::Status status = ::write(fd, "\n", 1) == 1 ? absl::OkStatus() : cannot_create(what, errno);
  if (::close(fd) != 0 && status.ok()) status = cannot_create(what, errno);
  ::unlink(partial.c_str());
  return status;
}

absl::Status check_pair(const NamedPath& a, const NamedPath& b) {
  const fs::path one = resolved(a.path), other = resolved(b.path);
  if (one != other && partial_of(one) != other && one != partial_of(other)) return absl::OkStatus();
  return make_error(ExitCode::kUsage, a.option + " " + a.path.string() + " and " + b.option + " " + b.path.string() +
                                          " are one file. [T0025] hint: each output needs a name of its own");
}

}  // namespace

absl::Status check_outputs(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs,
                           Existing existing) {
  std::vector<NamedPath> asked;
  for (const NamedPath& output : outputs)
    if (!output.path.empty()) asked.push_back(output);
  for (const NamedPath& output : asked) {
    if (!output.path.has_filename())
      return make_error(ExitCode::kCannotCreate, output.option + " " + output.path.string() +
                                                     " is a directory. [T0026] hint: name a file that may be created");
    TESSERA_RETURN_IF_ERROR(check_place(output, inputs, existing));
  }
  for (std::size_t i = 0; i < asked.size(); ++i)
    for (std::size_t k = 0; k < i; ++k) TESSERA_RETURN_IF_ERROR(check_pair(asked[k], asked[i]));
  for (const NamedPath& output : asked) {
    TESSERA_RETURN_IF_ERROR(make_folder(output));
    // The path "new/../data" can be resolved only when "new" exists.
    TESSERA_RETURN_IF_ERROR(check_place(output, inputs, existing));
  }
  for (const NamedPath& output : asked) TESSERA_RETURN_IF_ERROR(try_place(output));
  return absl::OkStatus();
}

absl::Status write_output(const fs::path& path, std::string_view bytes, Existing existing, const std::string& what) {
  TESSERA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path, what));
  TESSERA_RETURN_IF_ERROR(file.append(bytes));
  return file.finish(existing);
}

}  // namespace tessera::app
