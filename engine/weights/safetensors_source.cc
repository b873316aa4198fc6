#include <ATen/ops/empty.h>

#include <utility>

#include "checkpoint/tensor_files.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/weights/open_weights.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

class SafetensorsSource : public TensorSource {
 public:
  SafetensorsSource(TensorFiles files, const WeightsPart& part, const std::vector<const std::string*>& names)
      : files_(std::move(files)) {
    for (const auto& [name, number] : part.tensors) {
      const TensorFiles::Place& place = files_.tensors().at(*names[number]);
      places_.emplace(name, &place);
      tensors_.emplace(name, StoredTensor{place.tensor.dtype, type_of_word(place.tensor.dtype), place.tensor.shape});
    }
  }

  absl::StatusOr<at::Tensor> read(const std::string& name, std::int64_t first, std::int64_t numel) override {
    const c10::ScalarType type = *tensors_.at(name).scalar_type;
    at::Tensor values = at::empty({numel}, at::TensorOptions(type));
    TESSERA_RETURN_IF_ERROR(
        files_.read(*places_.at(name), first * static_cast<std::int64_t>(c10::elementSize(type)), bytes_of(values)));
    return values;
  }

 private:
  TensorFiles files_;
  std::map<std::string, const TensorFiles::Place*> places_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> open_safetensors(const std::string& path, const std::string& who,
                                                               const WeightsRequest& request) {
  TESSERA_ASSIGN_OR_RETURN(TensorFiles files, TensorFiles::open(path, who));
  WeightsNode root{.kind = WeightsNode::Kind::kDictionary};
  std::vector<const std::string*> names;
  for (const auto& [name, place] : files.tensors()) {
    root.entries.push_back({.name = name, .kind = WeightsNode::Kind::kTensor, .tensor = names.size()});
    names.push_back(&name);
  }
  WeightsPart part;
  if (!names.empty()) {
    auto chosen = choose_part(root, request);
    if (!chosen.ok()) return make_error(exit_code_of(chosen.status()), path + " " + message_of(chosen.status()));
    part = *std::move(chosen);
  }
  return std::make_unique<SafetensorsSource>(std::move(files), part, names);
}

}  // namespace tessera
