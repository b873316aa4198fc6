#include "checkpoint/tensor_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/json_fields.h"
#include "offload/files/file_place.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostIndexBytes = std::int64_t{64} << 20;
constexpr std::size_t kMostIndexValues = std::size_t{1} << 21;
constexpr std::size_t kMostFiles = 10'000;
constexpr std::size_t kMostFileName = 255;
constexpr std::string_view kSuffix = ".safetensors";
constexpr char kConvertHint[] =
    ". [T0081] hint: scripts/to_safetensors.py turns .pt and .bin files, DCP and DeepSpeed's checkpoints into "
    "safetensors";

/// Returns whether a file that is not a safetensors file begins like a pickle or a zip archive. (In a safetensors file
/// these bytes may be a length.)
bool is_pickle(std::string_view head) { return head.starts_with("PK\x03\x04") || head.starts_with("\x80"); }

/// Returns whether `name` is the name of a file in the index's own folder, and not a path to another folder.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.size() <= kMostFileName && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

absl::Status pickle_refused(const std::string& name) {
  return make_error(
      ExitCode::kCorruptData,
      name + " is a pickle or a zip archive of PyTorch, and such files are not read: they may run any program" +
          kConvertHint);
}

absl::Status no_safetensors(const std::string& name, std::uint64_t length, const RegularFile& file) {
  return make_error(ExitCode::kCorruptData,
                    fmt::format("{} is no safetensors file: wanted 8 bytes with the length of its header, which is at "
                                "most {} and that of the rest of the file, got {} in a file of {} bytes{}",
                                name, TensorHeader::kMostBytes, length, file.bytes(), kDamagedFileHint));
}

absl::Status no_model_in(const std::string& folder, const std::string& who) {
  std::error_code error;
  std::string pickles;
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", ".metadata", "latest"})
    if (pickles.empty() && fs::exists(fs::path(folder) / name, error)) pickles = name;
  const std::string what = fmt::format("{}: {} holds neither {} nor {}", who, folder, kModelFile, kIndexFile);
  return make_error(ExitCode::kNoInput, pickles.empty()
                                            ? what + ". [T0082] hint: name the folder of a model, or a safetensors file"
                                            : what + ", but " + pickles + kConvertHint);
}

}  // namespace

absl::StatusOr<TensorFiles> TensorFiles::open(const std::string& path, const std::string& who) {
  TensorFiles files(who);
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    TESSERA_RETURN_IF_ERROR(path.ends_with(kIndexSuffix) ? files.add_indexed(folder_of_file(path), path)
                                                         : files.add_file(path));
    return files;
  }
  const std::string model = path + "/" + kModelFile, index = path + "/" + kIndexFile;
  if (fs::symlink_status(model, error).type() != fs::file_type::not_found) {
    TESSERA_RETURN_IF_ERROR(files.add_file(model));
  } else if (fs::symlink_status(index, error).type() != fs::file_type::not_found) {
    TESSERA_RETURN_IF_ERROR(files.add_indexed(path, index));
  } else {
    return no_model_in(path, who);
  }
  return files;
}

absl::Status TensorFiles::add_file(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(RegularFile file, RegularFile::open(path, who_));
  const std::string name = who_ + ": " + path;
  std::array<std::byte, TensorHeader::kLengthBytes> head{};
  TESSERA_RETURN_IF_ERROR(file.read(
      0, std::span(head).first(static_cast<std::size_t>(std::min(file.bytes(), TensorHeader::kLengthBytes)))));
  std::uint64_t length = 0;
  std::memcpy(&length, head.data(), sizeof length);
  const std::int64_t room = file.bytes() - TensorHeader::kLengthBytes;
  if (room < 0 || length > static_cast<std::uint64_t>(std::min(room, TensorHeader::kMostBytes)))
    return is_pickle({reinterpret_cast<const char*>(head.data()), head.size()}) ? pickle_refused(name)
                                                                                : no_safetensors(name, length, file);
  std::string json(static_cast<std::size_t>(length), '\0');
  TESSERA_RETURN_IF_ERROR(file.read(TensorHeader::kLengthBytes, std::as_writable_bytes(std::span(json))));
  TESSERA_ASSIGN_OR_RETURN(TensorHeader header,
                           read_tensor_header(name, json, room - static_cast<std::int64_t>(length)));
  for (FileTensor& tensor : header.tensors) {
    const auto [place, is_new] = tensors_.try_emplace(tensor.name, Place{files_.size(), tensor});
    if (!is_new)
      return make_error(ExitCode::kCorruptData, name + " holds the tensor " + quoted_text(tensor.name, 120) +
                                                    ", and so does " + files_[place->second.file].path +
                                                    ". [T0083] hint: leave one of the files out of the index");
  }
  files_.push_back({path, TensorHeader::kLengthBytes + static_cast<std::int64_t>(length), file.bytes()});
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> read_model_index(const std::string& path, const std::string& who) {
  const std::string name = who + ": " + path;
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_regular_text(path, kMostIndexBytes, who));
  TESSERA_ASSIGN_OR_RETURN(const JsonNode root, parse_checkpoint_json(name, text, kMostIndexValues));
  absl::Status status;
  const JsonFields fields(root, name, "", status);
  const std::vector<JsonNode>& map = fields.children("weight_map");
  TESSERA_RETURN_IF_ERROR(status);
  std::map<std::string, std::string> files;
  std::set<std::string> names;
  for (const JsonNode& each : map) {
    const std::string file = each.value.is_string() ? each.value.get<std::string>() : "";
    if (!is_plain_name(file))
      return make_error(ExitCode::kCorruptData,
                        fmt::format("{}: {}: wanted the name of a file of this folder, got {}{}", name,
                                    json_pointer("/weight_map", each.key), describe(each), kDamagedFileHint));
    names.insert(file);
    files.emplace(each.key, file);
  }
  if (names.empty() || names.size() > kMostFiles)
    return make_error(ExitCode::kCorruptData, fmt::format("{}: /weight_map: wanted 1 to {} files, got {}{}", name,
                                                          kMostFiles, names.size(), kDamagedFileHint));
  return files;
}

absl::Status TensorFiles::add_indexed(const std::string& folder, const std::string& index) {
  TESSERA_ASSIGN_OR_RETURN(const auto map, read_model_index(index, who_));
  const std::string name = who_ + ": " + index;
  std::set<std::string> names;
  for (const auto& [tensor, file] : map) {
    if (!file.ends_with(kSuffix))
      return make_error(ExitCode::kCorruptData,
                        fmt::format("{}: {}: wanted the name of a {} file of this folder, got {}{}", name,
                                    json_pointer("/weight_map", tensor), kSuffix, quoted_text(file), kDamagedFileHint));
    names.insert(file);
  }
  for (const std::string& file : names) TESSERA_RETURN_IF_ERROR(add_file(folder + "/" + file));
  for (const auto& [tensor, file] : map) {
    const auto place = tensors_.find(tensor);
    const std::string wanted = folder + "/" + file;
    if (place == tensors_.end() || files_[place->second.file].path != wanted)
      return make_error(ExitCode::kCorruptData, name + ": the tensor " + quoted_text(tensor, 120) + " is not in " +
                                                    wanted + ". [T0084] hint: take index and files from one source");
  }
  return absl::OkStatus();
}

absl::Status TensorFiles::read(const Place& place, std::int64_t first, std::span<std::byte> bytes) {
  const File& file = files_[place.file];
  if (!open_file_ || open_file_->path() != file.path) {
    TESSERA_ASSIGN_OR_RETURN(RegularFile opened, RegularFile::open(file.path, who_));
    open_file_ = std::move(opened);
  }
  if (open_file_->bytes() != file.bytes)
    return make_error(
        ExitCode::kCorruptData,
        fmt::format(
            "{}: {} has {} bytes, and had {} when it was looked at. [T0085] hint: let nobody write it meanwhile", who_,
            file.path, open_file_->bytes(), file.bytes));
  return open_file_->read(file.data_begin + place.tensor.begin + first, bytes);
}

}  // namespace tessera
