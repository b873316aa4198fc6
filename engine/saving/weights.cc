#include "tessera/weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/job/outcomes.h"
#include "engine/saving/engine_safetensors.h"
#include "engine/weights/open_weights.h"
#include "engine/weights/weights_part.h"
#include "engine/weights/weights_writer.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

using NamedTensor = std::pair<std::string, at::Tensor>;

/// Throws rank 0's error on all ranks.
void throw_on_all_ranks(Collectives& control, const absl::Status& of_rank_0) {
  const absl::Status shared = share_status(control, "save_weights", of_rank_0);
  if (!shared.ok()) throw Error(exit_code_of(shared), "rank 0: " + message_of(shared));
}

absl::StatusOr<WeightsRequest> request_of(const std::vector<WantedTensor>& wanted, const LoadOptions& options) {
  WeightsRequest request{.part = options.part, .without = options.without};
  std::map<std::string, const WantedTensor*> owners;
  const auto add = [&](const WantedTensor& tensor, const std::string& name) -> absl::Status {
    const std::string bare = name_without(name, options.without);
    request.wanted.insert(bare);
    const WantedTensor* const owner = owners.emplace(bare, &tensor).first->second;
    if (owner == &tensor) return absl::OkStatus();
    return make_error(ExitCode::kUsage,
                      "load_weights: " + owner->name + " and " + name + " of the model are both " + bare +
                          " once those pieces are left out. [T0349] hint: leave fewer pieces of names out by " +
                          say(phrases::kWithout));
  };
  for (const WantedTensor& tensor : wanted) {
    TESSERA_RETURN_IF_ERROR(add(tensor, tensor.name));
    for (const std::string& alias : tensor.aliases) TESSERA_RETURN_IF_ERROR(add(tensor, alias));
  }
  return request;
}

MatchRules rules_of(const LoadOptions& options) {
  MatchRules rules{.ignored = options.ignored};
  if (!options.without.empty())
    rules.names = [without = options.without](const std::string& name) {
      return NameInFile{{name_without(name, without)}};
    };
  rules.hint = [](const std::vector<std::string>& wanted, const std::vector<std::string>& in_file) {
    const std::string hint = hint_of_pieces({wanted.begin(), wanted.end()}, in_file);
    return !hint.empty() ? hint
                         : "\n[T0350] hint: make the module with the sizes and names of the one that was saved; " +
                               say(phrases::kIgnored) + " passes over what it need not have";
  };
  return rules;
}

absl::StatusOr<std::unique_ptr<TensorSource>> open_for(const std::vector<WantedTensor>& wanted,
                                                       const std::filesystem::path& path, const LoadOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const WeightsRequest request, request_of(wanted, options));
  return open_weights(path, request);
}

void expect_memory(const ModuleTensors& into) {
  for (std::size_t i = 0; i < into.tensors.size(); ++i) {
    if (into.tensors[i].is_meta())
      throw Error(ExitCode::kUsage,
                  "load_weights: " + into.wanted[i].name +
                      " has no memory yet. [T0351] hint: make the Engine first, which gives it memory, and load "
                      "the weights into the Engine; or make the module without " +
                      say(phrases::kDeferred) + " and not on the meta device");
  }
}

/// Copies values into the tensor. If dtypes differ, the tensor gets new memory with the dtype of the file.
void give(at::Tensor& tensor, const at::Tensor& values) {
  if (tensor.scalar_type() == values.scalar_type())
    tensor.copy_(values);
  else
    tensor.set_data(at::empty_like(tensor, tensor.options().dtype(values.scalar_type())).copy_(values));
}

}  // namespace

void EngineSafetensors::save(const std::filesystem::path& path, WeightsForm form, Existing existing) {
  const at::NoGradGuard no_grad;
  const Job& job = training_.job;
  training_.bring_replicas_together("save_weights");
  std::optional<WeightsWriter> writer;
  absl::Status status;
  if (job.mesh.is_main()) {
    status = status_from([&]() -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path, "weights"));
      writer.emplace(std::move(file), *job.module, form);
      return absl::OkStatus();
    });
  }
  throw_on_all_ranks(*job.axes.control, status);
  for (const auto& unit : training_.units) {
    std::vector<at::Tensor> parameters;
    for (const auto& group : unit->groups) {
      for (const FlatParameter& parameter : group->parameters) parameters.push_back(parameter.tensor);
    }
    if (parameters.empty()) continue;
    Gathered gathered(engine_, parameters, Gathered::kForOwnUse);
    for (const at::Tensor& parameter : parameters) {
      if (writer) writer->add(parameter);
    }
    gathered.close();
  }
  if (writer) {
    for (const auto& item : whole_tensors(*job.module, job.strategy.units)) writer->add(item.value());
    status = writer->finish(existing);
  }
  throw_on_all_ranks(*job.axes.control, status);
}

void save_weights(Engine& engine, const std::filesystem::path& path, Existing existing) {
  save_weights(engine, path, WeightsForm::kDictionary, existing);
}

void save_weights(Engine& engine, const std::filesystem::path& path, WeightsForm form, Existing existing) {
  EngineSafetensors(engine).save(path, form, existing);
}

void load_weights(const std::vector<NamedTensor>& tensors, const std::filesystem::path& path,
                  const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  ModuleTensors into = wanted_by(tensors);
  expect_memory(into);
  const auto source = value_or_throw(open_for(into.wanted, path, options));
  const auto matched = match_tensors(*source, into.wanted, rules_of(options));
  if (!matched.ok()) throw Error(exit_code_of(matched.status()), path.string() + ": " + message_of(matched.status()));
  // Everything is read before anything is changed.
  std::vector<at::Tensor> values;
  for (const MatchedTensor& each : matched->tensors) values.push_back(value_or_throw(read_whole(*source, each)));
  for (std::size_t i = 0; i < values.size(); ++i) give(into.tensors[i], std::exchange(values[i], at::Tensor()));
  if (!matched->unused.empty()) log_import(path.string(), into.tensors.size(), matched->unused);
}

void load_weights(torch::nn::Module& module, const std::filesystem::path& path, const LoadOptions& options) {
  load_weights(named_tensors(module), path, options);
}

void load_weights(Engine& engine, const std::filesystem::path& path, const LoadOptions& options) {
  EngineSafetensors(engine).import_from(
      {"load_weights", path.string(), rules_of(options),
       [&](const std::vector<WantedTensor>& wanted) { return open_for(wanted, path, options); }});
}

}  // namespace tessera
