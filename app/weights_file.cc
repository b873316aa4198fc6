#include "app/weights_file.h"

#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/input_file.h"
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

absl::StatusOr<std::vector<char>> read_bytes(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const InputFile file, InputFile::open(path, "weights file"));
  std::vector<char> bytes(file.size());
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got = ::read(file.fd(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return input_error(path, "weights file", "cannot be read", errno);
    if (got == 0) bytes.resize(done);  // cut short meanwhile
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

absl::StatusOr<Weights> read_weights(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<char> bytes, read_bytes(path));
  try {
    return c10::impl::toTypedDict<std::string, at::Tensor>(torch::jit::pickle_load(bytes).toGenericDict());
  } catch (const std::exception&) {
    return make_error(ExitCode::kCorruptData, "weights file " + path.string() +
                                                  " is not a file of weights (a dictionary from names to tensors, as "
                                                  "torch.save writes it), or cut short");
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

absl::Status save_weights(Engine& engine, torch::nn::Module& module, int rank, const std::filesystem::path& path,
                          Existing existing) {
  Gathered gathered(engine);
  std::vector<char> bytes;
  if (rank == 0) bytes = torch::jit::pickle_save(c10::IValue(weights_of(module)));
  gathered.close();
  if (rank != 0) return absl::OkStatus();
  return write_output(path, std::string_view(bytes.data(), bytes.size()), existing, "weights");
}

absl::Status load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const Weights weights, read_weights(path));
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
