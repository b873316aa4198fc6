#include "engine/loop/weights_writer.h"

#include <ATen/core/Dict.h>
#include <ATen/ops/from_blob.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

/// As `tensor` in shape and dtype, contiguous, without memory: the pickler looks at sizes, not at values.
at::Tensor placeholder_for(const at::Tensor& tensor) {
  return at::from_blob(nullptr, tensor.sizes(), at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
}

}  // namespace

WeightsWriter::WeightsWriter(OutputFile file, const std::vector<std::pair<std::string, at::Tensor>>& entries)
    : file_(std::move(file)) {
  c10::Dict<std::string, at::Tensor> dictionary;
  std::vector<at::Tensor> placeholders;  // as tensors_
  for (const auto& [name, tensor] : entries) {
    const auto known = std::find_if(tensors_.begin(), tensors_.end(), [&](auto& t) { return t.is_same(tensor); });
    const auto record = static_cast<std::size_t>(known - tensors_.begin());
    if (known == tensors_.end()) {
      tensors_.push_back(tensor);
      placeholders.push_back(placeholder_for(tensor));
    }
    dictionary.insert(name, placeholders[record]);
  }
  std::string pickled;
  const auto append = [&](const char* bytes, std::size_t size) { pickled.append(bytes, size); };
  // Without tags of types, which torch.load takes from files it trusts only.
  torch::jit::Pickler pickler(append, nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(c10::IValue(dictionary));
  pickler.stop();
  // Records are numbered as the pickler met the tensors.
  std::vector<at::Tensor> in_order;
  for (const at::Tensor& met : pickler.tensorData()) {
    const auto place = std::find_if(placeholders.begin(), placeholders.end(), [&](auto& p) { return p.is_same(met); });
    in_order.push_back(tensors_.at(static_cast<std::size_t>(place - placeholders.begin())));
  }
  tensors_ = std::move(in_order);
  archive_ = std::make_unique<caffe2::serialize::PyTorchStreamWriter>([this](const void* bytes, std::size_t size) {
    if (status_.ok()) status_ = file_.append({static_cast<const char*>(bytes), size});
    return size;
  });
  archive_->writeRecord("data.pkl", pickled.data(), pickled.size());
}

WeightsWriter::~WeightsWriter() = default;

void WeightsWriter::add(const at::Tensor& tensor) {
  const auto place = std::find_if(tensors_.begin(), tensors_.end(), [&](auto& t) { return t.is_same(tensor); });
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
