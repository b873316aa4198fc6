#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/tensor_files_writer.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/job/outcomes.h"
#include "engine/saving/engine_safetensors.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

/// A parameter or buffer, with its form in the file.
struct Exported {
  at::Tensor tensor;
  bool transposed = false;
  c10::ScalarType type = c10::kFloat;
  Unit* unit = nullptr;  ///< the unit of a parameter; null for a buffer
  FileTensor in_file;
};

Exported exported(const std::string& name, const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, Unit* unit,
                  const ExportOptions& options) {
  const NameInFile in_file = options.names ? options.names(name) : NameInFile{{name}};
  if (in_file.names.empty())
    throw Error(ExitCode::kUsage, "export_safetensors: ExportOptions::names gives " + name +
                                      " no name. [T0160] hint: return at least one name for each parameter and buffer");
  Exported result;
  result.tensor = tensor;
  result.transposed = in_file.transposed && sizes.size() == 2;
  result.unit = unit;
  const bool converts = options.dtype && c10::isFloatingType(tensor.scalar_type());
  result.type = converts ? scalar_type_of(*options.dtype) : tensor.scalar_type();
  result.in_file = {.name = in_file.names.front(), .dtype = safetensors_word(result.type, name), .shape = sizes};
  if (result.transposed) std::swap(result.in_file.shape[0], result.in_file.shape[1]);
  return result;
}

/// Lists all tensors in the order in which they are written. Wide elements come first, so that each tensor lies at a
/// multiple of its element's size; tensors with elements of the same size keep the order of units.
std::vector<Exported> tensors_of(const Training& training, const ExportOptions& options) {
  std::vector<Exported> tensors;
  for_each_parameter(training.units, [&](FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    tensors.push_back(exported(parameter.name, parameter.tensor, parameter.sizes, group.unit, options));
  });
  for (const auto& item : whole_tensors(*training.job.module, training.job.strategy.units))
    tensors.push_back(exported(item.key(), item.value(), item.value().sizes().vec(), nullptr, options));
  std::ranges::stable_sort(tensors, std::ranges::greater(),
                           [](const Exported& each) { return c10::elementSize(each.type); });
  std::set<std::string> names;
  for (const Exported& each : tensors)
    if (!names.insert(each.in_file.name).second)
      throw Error(ExitCode::kUsage,
                  "export_safetensors: two tensors would have the name " + quoted_text(each.in_file.name, 200) +
                      " in the file. [T0161] hint: ExportOptions::names must give every tensor a name of its own");
  return tensors;
}

absl::Status append(TensorFilesWriter& writer, const Exported& each) {
  const at::Tensor values = each.transposed ? each.tensor.detach().t() : each.tensor.detach();
  const at::Tensor host = values.to(at::kCPU, each.type).contiguous();
  return writer.append(bytes_of(host));
}

}  // namespace

void EngineSafetensors::export_to(const std::string& folder, const ExportOptions& options) {
  expect_between_steps("export_safetensors");
  training_.bring_replicas_together("export_safetensors");
  const std::vector<Exported> tensors = tensors_of(training_, options);
  const auto share = [&](const char* label, const absl::Status& own) {
    throw_if_error(share_status(*training_.job.axes.control, label, own));
  };
  std::optional<TensorFilesWriter> writer;
  absl::Status status;
  if (training_.job.mesh.is_main()) {
    std::vector<FileTensor> in_file;
    for (const Exported& each : tensors) in_file.push_back(each.in_file);
    auto created = TensorFilesWriter::create(folder, in_file, options.most_bytes, options.existing, "rank 0");
    status = created.status();
    if (created.ok()) writer.emplace(*std::move(created));
  }
  share("export begins", status);
  for (std::size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    Unit* const unit = tensors[begin].unit;
    std::vector<at::Tensor> together;
    for (; end < tensors.size() && tensors[end].unit == unit; ++end) together.push_back(tensors[end].tensor);
    std::unique_ptr<Gathered> gathered;
    if (unit) gathered.reset(new Gathered(engine_, together, Gathered::kForOwnUse));
    const at::NoGradGuard no_grad;
    for (std::size_t i = begin; i < end && writer; ++i)
      if (status.ok()) status = status_from([&] { return append(*writer, tensors[i]); });
    if (gathered) gathered->close();
  }
  if (writer && status.ok()) status = writer->finish();
  share("export written", status);
}

void export_safetensors(Engine& engine, const std::filesystem::path& folder, const ExportOptions& options) {
  EngineSafetensors(engine).export_to(folder.string(), options);
}

}  // namespace tessera
