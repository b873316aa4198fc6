// tessera checkpoint export: writes the weights of a checkpoint as a model of Hugging Face.

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/saved_checkpoint.h"
#include "checkpoint/tensor_files_writer.h"
#include "runtime/base/bytes.h"
#include "runtime/base/status.h"
#include "workshop/app/commands.h"
#include "workshop/app/exit_code_after.h"
#include "workshop/app/hugging_face.h"
#include "workshop/app/output_files.h"
#include "workshop/models/hf_config.h"
#include "workshop/models/hf_names.h"

namespace tessera::app {
namespace {

constexpr char kExport[] = "tessera checkpoint export";
constexpr std::int64_t kPortionOfTensor = std::int64_t{1} << 20;  // elements converted at once

/// A parameter, with its entries in the checkpoint and in the file.
struct ExportedParameter {
  const SavedParameter* saved = nullptr;
  bool transposed = false;
  FileTensor in_file;
};

struct WordAndType {
  const char* name;
  const char* word;
  c10::ScalarType type;
};
constexpr WordAndType kTypes[] = {
    {"fp32", "F32", c10::kFloat}, {"bf16", "BF16", c10::kBFloat16}, {"fp16", "F16", c10::kHalf}};

/// Returns the type with this name. `key` is the field that is compared: the name in --dtype or the name in
/// safetensors.
template <class Key>
absl::StatusOr<WordAndType> type_named(const std::string& name, Key WordAndType::*key) {
  for (const WordAndType& each : kTypes)
    if (name == each.*key) return each;
  return make_error(ExitCode::kConfig, c10::str(kExport, ": a parameter is ", name,
                                                ", and exported are F32, BF16 and F16. [T0011] hint: "
                                                "export_safetensors (tessera/safetensors.h) writes every type"));
}

std::span<const std::byte> bytes_of_tensor(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

class CheckpointExport {
 public:
  CheckpointExport(SavedCheckpoint& checkpoint, const CheckpointCommand& command)
      : checkpoint_(checkpoint), command_(command) {}

  absl::Status run() {
    TESSERA_RETURN_IF_ERROR(read_model());
    TESSERA_ASSIGN_OR_RETURN(type_, type_named(command_.dtype, &WordAndType::name));
    TESSERA_RETURN_IF_ERROR(models::to_hf_config(model_, "float32").status());
    const std::vector<ExportedParameter> parameters = look();
    std::vector<FileTensor> tensors;
    for (const ExportedParameter& each : parameters) tensors.push_back(each.in_file);
    const Existing existing = command_.overwrite ? Existing::kReplaced : Existing::kKept;
    TESSERA_RETURN_IF_ERROR(
        check_outputs({{"folder", std::filesystem::path(command_.folder) / "config.json"}}, {}, existing));
    TESSERA_ASSIGN_OR_RETURN(
        TensorFilesWriter writer,
        TensorFilesWriter::create(command_.folder, tensors, TensorFilesWriter::kMostBytes, existing, kExport));
    for (const ExportedParameter& each : parameters) TESSERA_RETURN_IF_ERROR(write(each, writer));
    TESSERA_RETURN_IF_ERROR(writer.finish());
    return write_hf_config(command_.folder, model_, command_.dtype, existing);
  }

 private:
  absl::Status read_model() {
    const auto& items = checkpoint_.manifest().json_items;
    const auto found = items.find("model");
    if (found == items.end())
      return make_error(ExitCode::kConfig,
                        c10::str(kExport, ": ", checkpoint_.folder(),
                                 " does not say what model it is of: it was not saved by `tessera train`. "
                                 "[T0012] hint: export_safetensors (tessera/safetensors.h) writes any module"));
    TESSERA_ASSIGN_OR_RETURN(model_, models::parse_model_config(found->second, checkpoint_.folder() + ": model"));
    return absl::OkStatus();
  }

  std::vector<ExportedParameter> look() const {
    const TensorNames names = models::hf_names(model_);
    std::vector<ExportedParameter> parameters;
    for (const SavedParameter& saved : checkpoint_.manifest().parameters) {
      const NameInFile name = names(saved.name);
      ExportedParameter each{&saved, name.transposed && saved.shape.size() == 2, {}};
      each.in_file.name = name.names[0];
      each.in_file.dtype = type_.word;
      each.in_file.shape = saved.shape;
      if (each.transposed) std::swap(each.in_file.shape[0], each.in_file.shape[1]);
      parameters.push_back(std::move(each));
    }
    return parameters;
  }

  /// Reads elements [first, first + numel) in memory order, and converts them to `type_`.
  absl::StatusOr<at::Tensor> read(const SavedParameter& saved, std::int64_t first, std::int64_t numel) {
    TESSERA_ASSIGN_OR_RETURN(const WordAndType stored,
                             type_named(saved.trains ? "F32" : saved.dtype, &WordAndType::word));
    const at::Tensor values = at::empty({numel}, at::TensorOptions(stored.type));
    TESSERA_RETURN_IF_ERROR(checkpoint_.read(saved.trains ? kMaster : kValue, saved.name, first,
                                             {static_cast<std::byte*>(values.data_ptr()), values.nbytes()}));
    return values.to(type_.type);
  }

  absl::Status write(const ExportedParameter& each, TensorFilesWriter& writer) {
    const SavedParameter& saved = *each.saved;
    const std::int64_t numel = numel_of(saved.shape);
    if (each.transposed || !saved.strides.empty()) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor flat, read(saved, 0, numel));
      const at::Tensor whole =
          saved.strides.empty() ? flat.view(saved.shape) : flat.as_strided(saved.shape, saved.strides);
      return writer.append(bytes_of_tensor((each.transposed ? whole.t() : whole).contiguous()));
    }
    for (std::int64_t first = 0; first < numel; first += kPortionOfTensor) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor portion, read(saved, first, std::min(kPortionOfTensor, numel - first)));
      TESSERA_RETURN_IF_ERROR(writer.append(bytes_of_tensor(portion)));
    }
    return absl::OkStatus();
  }

  SavedCheckpoint& checkpoint_;
  const CheckpointCommand& command_;
  models::ModelConfig model_;
  WordAndType type_ = kTypes[0];
};

absl::Status export_checkpoint(const CheckpointCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const std::string folder, find_checkpoint(command.path, kExport));
  TESSERA_ASSIGN_OR_RETURN(const auto checkpoint, SavedCheckpoint::open(folder, kExport));
  TESSERA_RETURN_IF_ERROR(CheckpointExport(*checkpoint, command).run());
  std::printf("%s: the weights of %s, %zu parameters in %s\n", command.folder.c_str(), folder.c_str(),
              checkpoint->manifest().parameters.size(), command.dtype.c_str());
  return absl::OkStatus();
}

}  // namespace

int run_checkpoint_export(const CheckpointCommand& command) { return exit_code_after(export_checkpoint(command)); }

}  // namespace tessera::app
