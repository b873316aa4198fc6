#include "app/weights_file.h"

#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "runtime/border/throw.h"
#include "tessera/engine.h"

namespace tessera::app {
namespace {

using Weights = c10::Dict<std::string, at::Tensor>;

/// In host memory.
at::Tensor copy_of(const at::Tensor& value) {
  return value.detach().to(at::TensorOptions(at::kCPU), /*non_blocking=*/false, /*copy=*/true);
}

Weights weights_of(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  Weights weights;
  for (const auto& item : module.named_parameters()) weights.insert(item.key(), copy_of(item.value()));
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) weights.insert(item.key(), copy_of(item.value()));
  }
  return weights;
}

/// Through a neighbour and a rename, so that a file of this name is always whole.
absl::Status write_file(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  const std::filesystem::path partial = path.string() + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  if (!file)
    return make_error(ExitCode::kCannotCreate,
                      "weights: cannot create " + partial.string() + ": " + std::generic_category().message(errno));
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (file.fail()) return make_error(ExitCode::kIo, "weights: cannot write " + partial.string());
  std::filesystem::rename(partial, path, error);
  if (error) return make_error(ExitCode::kCannotCreate, "weights: " + path.string() + ": " + error.message());
  return absl::OkStatus();
}

absl::StatusOr<Weights> read_file(const std::filesystem::path& path) {
  std::error_code error;
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path, error))
    return make_error(ExitCode::kNoInput, "weights: cannot read " + path.string());
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  try {
    return c10::impl::toTypedDict<std::string, at::Tensor>(torch::jit::pickle_load(bytes).toGenericDict());
  } catch (const std::exception&) {
    return make_error(ExitCode::kCorruptData, path.string() +
                                                  ": not a file of weights (a dictionary from names to "
                                                  "tensors, as torch.save writes it), or cut short");
  }
}

/// Puts one tensor of the file into the module's; says what is wrong otherwise.
void take(const Weights& weights, const std::string& name, at::Tensor& tensor, std::ostringstream& problems) {
  const auto found = weights.find(name);
  if (found == weights.end()) {
    problems << "\n  " << name << ": missing in the file";
  } else if (found->value().sizes() != tensor.sizes()) {
    problems << "\n  " << name << ": the model wants " << tensor.sizes() << ", the file has " << found->value().sizes();
  } else {
    tensor.set_data(found->value());
  }
}

}  // namespace

absl::Status save_weights(Engine& engine, torch::nn::Module& module, int rank, const std::filesystem::path& path) {
  Gathered gathered(engine);
  std::vector<char> bytes;
  if (rank == 0) bytes = torch::jit::pickle_save(c10::IValue(weights_of(module)));
  gathered.close();
  return rank == 0 ? write_file(path, bytes) : absl::OkStatus();
}

absl::Status load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const Weights weights, read_file(path));
  std::ostringstream problems;
  auto parameters = module.named_parameters();
  auto buffers = module.named_buffers();
  for (auto& item : parameters) take(weights, item.key(), item.value(), problems);
  for (auto& item : buffers) {
    if (item.value().defined()) take(weights, item.key(), item.value(), problems);
  }
  for (const auto& entry : weights) {
    if (!parameters.contains(entry.key()) && !buffers.contains(entry.key()))
      problems << "\n  " << entry.key() << ": the model has no such weight";
  }
  if (problems.str().empty()) return absl::OkStatus();
  return make_error(ExitCode::kCorruptData, path.string() + " does not fit the model file:" + problems.str());
}

}  // namespace tessera::app
