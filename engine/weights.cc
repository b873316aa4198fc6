#include "tessera/weights.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/loop/weights_reader.h"
#include "engine/loop/weights_writer.h"
#include "engine/outcomes.h"
#include "runtime/border/throw.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

using Weights = std::map<std::string, at::Tensor>;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b) || (a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.strides() == b.strides()))
    return true;
  if (a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor one = a.contiguous(), other = b.contiguous();
  return one.numel() == 0 || std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

/// Puts the tensors of a file into a module's, all or none.
class Fitting {
 public:
  explicit Fitting(const Weights& weights) : weights_(weights) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto found = weights_.find(name);
    if (found == weights_.end()) {
      problems_ << "\n  " << name << ": missing in the file";
    } else if (found->second.sizes() != tensor.sizes()) {
      problems_ << "\n  " << name << ": the model wants " << tensor.sizes() << ", the file has "
                << found->second.sizes();
    } else {
      add_fitting(name, tensor, found->second);
    }
  }
  void add_superfluous(const std::string& name) { problems_ << "\n  " << name << ": the model has no such weight"; }

  std::string problems() const { return problems_.str(); }
  void apply() {
    for (Pair& pair : pairs_) pair.tensor.set_data(pair.value);
  }

 private:
  struct Pair {
    std::string name;
    at::Tensor tensor, value;
  };

  /// A tied parameter has several names in the module and in the file, and one value.
  void add_fitting(const std::string& name, const at::Tensor& tensor, const at::Tensor& value) {
    const auto tied = std::ranges::find_if(pairs_, [&](const Pair& pair) { return pair.tensor.is_same(tensor); });
    if (tied == pairs_.end()) {
      pairs_.push_back({name, tensor, value});
    } else if (!same_bits(tied->value, value)) {
      problems_ << "\n  " << name << ": the model has one tensor for it and " << tied->name
                << ", the file has two of other values";
    }
  }

  const Weights& weights_;
  std::ostringstream problems_;
  std::vector<Pair> pairs_;
};

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
  auto tensors = value_or_throw(read_weights(path));
  const Weights weights(std::make_move_iterator(tensors.begin()), std::make_move_iterator(tensors.end()));
  Fitting fitting(weights);
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const auto& item : parameters) fitting.add(item.key(), item.value());
  for (const auto& item : buffers) {
    if (item.value().defined()) fitting.add(item.key(), item.value());
  }
  for (const auto& [name, tensor] : weights) {
    if (!parameters.contains(name) && !buffers.contains(name)) fitting.add_superfluous(name);
  }
  if (!fitting.problems().empty())
    throw Error(ExitCode::kCorruptData,
                path.string() + " does not fit the model:" + fitting.problems() +
                    "\nhint: make the module with the sizes and names of the one that was saved");
  fitting.apply();
}

}  // namespace tessera
