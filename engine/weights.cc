#include "tessera/weights.h"

#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/loop/weights_writer.h"
#include "engine/outcomes.h"
#include "runtime/base/input_file.h"
#include "runtime/border/throw.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

using Weights = c10::Dict<std::string, at::Tensor>;

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
    Weights weights;
    for (const auto& entry : torch::jit::pickle_load(bytes).toGenericDict())
      weights.insert(entry.key().toStringRef(), entry.value().toTensor());
    return weights;
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

/// Parameters and buffers, as the module names them.
std::vector<std::pair<std::string, at::Tensor>> entries_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> entries;
  for (const auto& item : module.named_parameters()) entries.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) entries.emplace_back(item.key(), item.value());
  }
  return entries;
}

/// Rank 0's error is everybody's.
void throw_on_all_ranks(Collectives& control, const absl::Status& of_rank_0) {
  const absl::Status shared = share_status(control, "save_weights", of_rank_0);
  if (!shared.ok()) throw Error(exit_code_of(shared), "rank 0: " + message_of(shared));
}

}  // namespace

void save_weights(Engine& engine, const std::filesystem::path& path, Existing existing) {
  const at::NoGradGuard no_grad;
  Engine::State& state = *engine.state_;
  state.bring_replicas_together("save_weights");
  std::optional<WeightsWriter> writer;
  absl::Status status;
  if (state.mesh.is_main()) {
    absl::StatusOr<OutputFile> file = OutputFile::create(path, "weights");
    status = file.status();
    if (status.ok()) writer.emplace(*std::move(file), entries_of(*state.module));
  }
  throw_on_all_ranks(*state.whole.control, status);
  for (const auto& unit : state.units) {
    std::vector<at::Tensor> parameters;
    for (const auto& group : unit->groups) {
      for (const FlatParameter& parameter : group->parameters) parameters.push_back(parameter.tensor);
    }
    if (parameters.empty()) continue;
    Gathered gathered(engine, parameters);
    for (const at::Tensor& parameter : parameters) {
      if (writer) writer->add(parameter);
    }
    gathered.close();
  }
  if (writer) {
    for (const auto& item : whole_tensors(*state.module, state.strategy.units)) writer->add(item.value());
    status = writer->finish(existing);
  }
  throw_on_all_ranks(*state.whole.control, status);
}

void load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  const Weights weights = value_or_throw(read_weights(path));
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
  if (problems.str().empty()) return;
  throw Error(ExitCode::kCorruptData, path.string() + " does not fit the model:" + problems.str());
}

}  // namespace tessera
