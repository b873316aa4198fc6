#include "engine/weights/weights_writer.h"

#include <ATen/core/Dict.h>
#include <ATen/ops/from_blob.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/python_print.h>

#include <algorithm>
#include <functional>

namespace tessera {
namespace {

/// Makes a module's tree as TorchScript. torch::save makes the same tree, and torch::load needs nothing else.
torch::jit::Module script_of(const torch::nn::Module& module, const std::shared_ptr<torch::jit::CompilationUnit>& unit,
                             const std::function<at::Tensor(const at::Tensor&)>& placeholder_for) {
  torch::jit::Module script("__torch__.Module", unit, /*shouldMangle=*/true);
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    script.register_parameter(item.key(), placeholder_for(item.value()), /*is_buffer=*/false);
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined())
      script.register_parameter(item.key(), placeholder_for(item.value()), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (child.value()->is_serializable())
      script.register_module(child.key(), script_of(*child.value(), unit, placeholder_for));
  }
  return script;
}

/// Returns the name of the record in which LibTorch looks for classes with a qualifier such as "__torch__".
std::string record_of_code(std::string qualifier) {
  std::ranges::replace(qualifier, '.', '/');
  return "code/" + qualifier + ".py";
}

}  // namespace

WeightsWriter::WeightsWriter(OutputFile file, const torch::nn::Module& module, WeightsForm form)
    : file_(std::move(file)) {
  archive_ = std::make_unique<caffe2::serialize::PyTorchStreamWriter>([this](const void* bytes, std::size_t size) {
    if (status_.ok()) status_ = file_.append({static_cast<const char*>(bytes), size});
    return size;
  });
  const c10::IValue root = form == WeightsForm::kDictionary ? dictionary_of(module) : archive_of(module);
  std::string pickled;
  const auto append = [&](const char* bytes, std::size_t size) { pickled.append(bytes, size); };
  // The pickler writes no type tags, because torch.load with weights_only=True refuses them.
  torch::jit::Pickler pickler(append, nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(root);
  pickler.stop();
  // Records are numbered in the order in which the pickler met the tensors.
  for (const at::Tensor& met : pickler.tensorData()) {
    const auto is_it = [&](const auto& pair) { return pair.second.is_same(met); };
    tensors_.push_back(std::ranges::find_if(placeholders_, is_it)->first);
  }
  write("data.pkl", pickled);
}

WeightsWriter::~WeightsWriter() = default;

at::Tensor WeightsWriter::placeholder_for(const at::Tensor& tensor) {
  const auto known = std::ranges::find_if(placeholders_, [&](const auto& pair) { return pair.first.is_same(tensor); });
  if (known != placeholders_.end()) return known->second;
  // The pickler reads only sizes, and no values.
  const at::Tensor placeholder =
      at::from_blob(nullptr, tensor.sizes(), at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
  return placeholders_.emplace_back(tensor, placeholder).second;
}

c10::IValue WeightsWriter::dictionary_of(const torch::nn::Module& module) {
  c10::Dict<std::string, at::Tensor> dictionary;
  for (const auto& item : module.named_parameters()) dictionary.insert(item.key(), placeholder_for(item.value()));
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) dictionary.insert(item.key(), placeholder_for(item.value()));
  }
  return dictionary;
}

c10::IValue WeightsWriter::archive_of(const torch::nn::Module& module) {
  const torch::jit::Module script = script_of(module, std::make_shared<torch::jit::CompilationUnit>(),
                                              [this](const at::Tensor& tensor) { return placeholder_for(tensor); });
  torch::jit::ExtraFilesMap code;
  std::vector<c10::IValue> constants;
  torch::jit::jitModuleToPythonCodeAndConstants(script, &code, &constants);
  for (const auto& [qualifier, text] : code) write(record_of_code(qualifier), text);
  write("constants.pkl", "\x80\x02).");  // an empty tuple, since classes without methods have no code
  return script._ivalue();
}

void WeightsWriter::write(const std::string& record, const std::string& bytes) {
  archive_->writeRecord(record, bytes.data(), bytes.size());
}

void WeightsWriter::add(const at::Tensor& tensor) {
  const auto place = std::ranges::find_if(tensors_, [&](const at::Tensor& each) { return each.is_same(tensor); });
  if (place == tensors_.end() || !status_.ok()) return;
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  archive_->writeRecord("data/" + std::to_string(place - tensors_.begin()), values.const_data_ptr(),
                        static_cast<std::size_t>(values.nbytes()));
}

absl::Status WeightsWriter::finish(Existing existing) {
  archive_->writeEndOfFile();
  if (!status_.ok()) return status_;
  return file_.finish(existing);
}

}  // namespace tessera
