#include "checkpoint/tensor_files_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <system_error>
#include <utility>

#include "checkpoint/tensor_files.h"
#include "offload/files/file_calls.h"
#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Returns whether the file is "model.safetensors", a part of a model, or the index.
bool is_model_file(const std::string& name) {
  static const std::regex kPart(R"(model-\d{5,}-of-\d{5,}\.safetensors)");
  return name == kModelFile || name == kIndexFile || std::regex_match(name, kPart);
}

}  // namespace

std::vector<TensorFilesWriter::Part> TensorFilesWriter::parts_of(const std::vector<FileTensor>& tensors,
                                                                 std::int64_t most_bytes) {
  std::vector<Part> parts(1);
  for (const FileTensor& tensor : tensors) {
    const std::int64_t bytes = numel_of(tensor.shape) * element_bits(tensor.dtype) / 8;
    if (!parts.back().tensors.empty() && parts.back().bytes > most_bytes - bytes) parts.emplace_back();
    parts.back().tensors.push_back(tensor);
    parts.back().bytes += bytes;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].name =
        parts.size() == 1 ? kModelFile : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, parts.size());
    place_tensors(parts[i].tensors);
  }
  return parts;
}

absl::StatusOr<std::vector<std::string>> TensorFilesWriter::model_files() const {
  std::vector<std::string> names;
  if (const int got = file_calls::list_folder(FilePlace(folder_, 0), names); got < 0)
    return make_error(ExitCode::kCannotCreate,
                      who_ + ": cannot list the folder " + folder_ + ": " + reason_of_writing(-got));
  std::erase_if(names, [](const std::string& name) { return !is_model_file(name); });
  return names;
}

absl::StatusOr<TensorFilesWriter> TensorFilesWriter::create(const std::string& folder,
                                                            const std::vector<FileTensor>& tensors,
                                                            std::int64_t most_bytes, Existing existing,
                                                            const std::string& who) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    return make_error(error == std::errc::permission_denied ? ExitCode::kPermission : ExitCode::kCannotCreate,
                      who + ": cannot create the folder " + folder + ": " + reason_of_writing(error.value()));
  TensorFilesWriter writer(folder, parts_of(tensors, most_bytes), existing, who);
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> there, writer.model_files());
  if (existing == Existing::kKept && !there.empty())
    return make_error(ExitCode::kCannotCreate,
                      fmt::format("{}: {}/{} exists already, and is kept. [T0086] hint: name another folder, or have "
                                  "it replaced (--overwrite, ExportOptions::existing)",
                                  who, folder, there.front()));
  TESSERA_RETURN_IF_ERROR(writer.open_next());
  return writer;
}

absl::Status TensorFilesWriter::open_next() {
  const Part& part = parts_[files_.size()];
  TESSERA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(fs::path(folder_) / part.name, who_));
  files_.push_back(std::move(file));
  left_ = part.bytes;
  return files_.back().append(write_tensor_header(part.tensors));
}

absl::Status TensorFilesWriter::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (left_ == 0) {
      if (files_.size() == parts_.size())
        return make_error(ExitCode::kInternal, who_ + ": " + folder_ + " got more bytes than its tensors have");
      TESSERA_RETURN_IF_ERROR(open_next());
      continue;
    }
    const auto now = bytes.first(std::min(bytes.size(), static_cast<std::size_t>(left_)));
    TESSERA_RETURN_IF_ERROR(files_.back().append({reinterpret_cast<const char*>(now.data()), now.size()}));
    left_ -= static_cast<std::int64_t>(now.size());
    bytes = bytes.subspan(now.size());
  }
  return absl::OkStatus();
}

absl::Status TensorFilesWriter::write_index() {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  std::int64_t bytes = 0;
  for (const Part& part : parts_) {
    bytes += part.bytes;
    for (const FileTensor& tensor : part.tensors) map[tensor.name] = part.name;
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(map)}};
  TESSERA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(fs::path(folder_) / kIndexFile, who_));
  TESSERA_RETURN_IF_ERROR(file.append(index.dump(2) + "\n"));
  return file.finish(existing_);
}

absl::Status TensorFilesWriter::finish() {
  // The files that begin here have only tensors without elements.
  while (left_ == 0 && files_.size() < parts_.size()) TESSERA_RETURN_IF_ERROR(open_next());
  if (left_ != 0)
    return make_error(ExitCode::kInternal, who_ + ": " + folder_ + " got fewer bytes than its tensors have");
  for (OutputFile& file : files_) TESSERA_RETURN_IF_ERROR(file.finish(existing_));
  if (parts_.size() > 1) TESSERA_RETURN_IF_ERROR(write_index());
  // Removes files of the earlier model that the new model does not have under the same name. The folder is listed now,
  // since the new model's files were open before, and their descriptors may have been the last ones.
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> there, model_files());
  for (const std::string& name : there) {
    const bool is_new =
        std::ranges::find(parts_, name, &Part::name) != parts_.end() || (parts_.size() > 1 && name == kIndexFile);
    if (!is_new) file_calls::unlink(FilePlace(folder_, 0) / name);  // a file that stays does no harm
  }
  return absl::OkStatus();
}

}  // namespace tessera
