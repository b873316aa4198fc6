#include "engine/weights/open_weights.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/tensor_files.h"
#include "engine/weights/little_endian.h"
#include "engine/weights/weights_kind.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kKindOfInput = "weights file";
constexpr const char* kTorchFile = "pytorch_model.bin";
constexpr const char* kTorchIndex = "pytorch_model.bin.index.json";
constexpr std::size_t kLongestInIndex = 200;

using OpenSource = std::unique_ptr<TensorSource>;

absl::Status weights_error(const fs::path& path, const absl::Status& status) {
  return make_error(exit_code_of(status), c10::str(kKindOfInput, " ", path.string(), " ", message_of(status)));
}

absl::StatusOr<std::string> beginning_of(const InputFile& file, const fs::path& path) {
  std::string bytes(std::min(file.size(), kBytesOfBeginning), '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::pread(file.fd(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return input_error(path, kKindOfInput, "cannot be read", errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

/// Returns whether a file begins like a safetensors file: with 8 bytes for the length of a JSON object, and the object.
bool is_safetensors(std::string_view beginning) {
  if (beginning.size() <= TensorHeader::kLengthBytes || beginning[TensorHeader::kLengthBytes] != '{') return false;
  return little_endian(beginning.substr(0, TensorHeader::kLengthBytes)) <=
         static_cast<std::uint64_t>(TensorHeader::kMostBytes);
}

absl::StatusOr<OpenSource> open_file(const fs::path& path, const WeightsRequest& request) {
  TESSERA_ASSIGN_OR_RETURN(InputFile file, InputFile::open(path, kKindOfInput));
  TESSERA_ASSIGN_OR_RETURN(const std::string beginning, beginning_of(file, path));
  if (beginning.starts_with("PK\x03\x04") || beginning.starts_with("PK\x05\x06")) {
    auto source = open_archive(std::move(file), request);
    if (!source.ok()) return weights_error(path, source.status());
    return source;
  }
  if (is_safetensors(beginning)) return open_safetensors(path.string(), "weights", request);
  const FileKind kind = kind_of_beginning(beginning);
  return weights_error(path, make_error(ExitCode::kCorruptData, c10::str(kind.what, ". ", kind.hint)));
}

/// The tensors of a model in several files.
class SeveralSources : public TensorSource {
 public:
  absl::Status add(const std::string& file, OpenSource source) {
    for (const auto& [name, tensor] : source->tensors()) {
      const auto [known, is_new] = places_.emplace(name, sources_.size());
      if (!is_new)
        return make_error(ExitCode::kCorruptData,
                          c10::str("has the tensor ", quoted_text(name, kLongestInIndex), " in ", file, " and in ",
                                   files_[known->second], ". [T0305] hint: take index and files from one source"));
      tensors_.emplace(name, tensor);
    }
    others_.insert(others_.end(), source->others().begin(), source->others().end());
    unused_.insert(unused_.end(), source->unused().begin(), source->unused().end());
    files_.push_back(file);
    sources_.push_back(std::move(source));
    return absl::OkStatus();
  }

  absl::Status expect(const std::string& name, const std::string& file) const {
    const auto place = places_.find(name);
    if (place != places_.end() && files_[place->second] == file) return absl::OkStatus();
    return make_error(ExitCode::kCorruptData,
                      c10::str("says that the tensor ", quoted_text(name, kLongestInIndex), " is in ", file,
                               ", and it is not. [T0306] hint: take index and files from one source"));
  }

  absl::StatusOr<at::Tensor> read(const std::string& name, std::int64_t first, std::int64_t numel) override {
    return sources_[places_.at(name)]->read(name, first, numel);
  }

 private:
  std::vector<OpenSource> sources_;
  std::vector<std::string> files_;
  std::map<std::string, std::size_t> places_;
};

absl::StatusOr<OpenSource> open_index(const fs::path& path, const WeightsRequest& request) {
  TESSERA_ASSIGN_OR_RETURN(const auto map, read_model_index(path.string(), "weights"));
  std::set<std::string> files;
  for (const auto& [name, file] : map) files.insert(file);
  if (files.begin()->ends_with(".safetensors")) return open_safetensors(path.string(), "weights", request);
  auto several = std::make_unique<SeveralSources>();
  for (const std::string& file : files) {
    TESSERA_ASSIGN_OR_RETURN(OpenSource source, open_file(path.parent_path() / file, request));
    const absl::Status added = several->add(file, std::move(source));
    if (!added.ok()) return weights_error(path, added);
  }
  for (const auto& [name, file] : map) {
    const absl::Status is_there = several->expect(name_without(name, request.without), file);
    if (!is_there.ok()) return weights_error(path, is_there);
  }
  return OpenSource(std::move(several));
}

struct FolderKind {
  const char* file;  ///< the file by which the kind is recognized
  FileKind kind;
};

constexpr FolderKind kFolders[] = {
    {"manifest.json",
     {"is a checkpoint of Tessera",
      "[T0307] hint: load_checkpoint goes on with it, and tessera checkpoint export writes its weights as "
      "safetensors"}},
    {".metadata",
     {"is a checkpoint of torch.distributed.checkpoint",
      "[T0308] hint: scripts/to_safetensors.py turns it into safetensors"}},
    {"latest",
     {"is a folder of checkpoints",
      "[T0309] hint: tessera checkpoint export writes the weights of Tessera's, and scripts/to_safetensors.py those of "
      "DeepSpeed's"}},
    {"adapter_config.json",
     {"holds an adapter of peft, which is a part of a model",
      "[T0310] hint: in Python, merge_and_unload() makes a whole model of it"}},
    {"saved_model.pb",
     {"is a SavedModel of TensorFlow",
      "[T0311] hint: read its arrays in Python, and write torch.save({name: torch.from_numpy(array)}, path) under the "
      "model's names"}},
    {"data.pkl",
     {"is a file of torch.save that was unpacked",
      "[T0312] hint: name the file itself; zip -0 -r makes one of the folder"}},
};

absl::StatusOr<OpenSource> open_folder(const fs::path& folder, const WeightsRequest& request) {
  std::error_code error;
  const auto has = [&](const char* name) { return fs::exists(folder / name, error); };
  if (has(kModelFile) || has(kIndexFile)) return open_safetensors(folder.string(), "weights", request);
  if (has(kTorchFile)) return open_file(folder / kTorchFile, request);
  if (has(kTorchIndex)) return open_index(folder / kTorchIndex, request);
  for (const FolderKind& each : kFolders) {
    if (has(each.file))
      return make_error(ExitCode::kCorruptData, c10::str(folder.string(), " ", each.kind.what, ". ", each.kind.hint));
  }
  return make_error(
      ExitCode::kNoInput,
      c10::str(folder.string(), " is a folder without weights. [T0313] hint: name a file of weights, or a folder with ",
               kModelFile, ", ", kTorchFile, " or an index of one"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> open_weights(const std::filesystem::path& path,
                                                           const WeightsRequest& request) {
  std::error_code error;
  if (fs::is_directory(path, error)) return open_folder(path, request);
  if (path.string().ends_with(kIndexSuffix)) return open_index(path, request);
  return open_file(path, request);
}

}  // namespace tessera
