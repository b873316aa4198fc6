#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "engine/job/outcomes.h"
#include "engine/memory/master_weights.h"
#include "engine/saving/engine_safetensors.h"
#include "engine/weights/open_weights.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "sharding/unrecorded.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

constexpr std::int64_t kSentElements = std::int64_t{1} << 18;  ///< number of elements that are sent at a time

std::vector<std::pair<std::string, at::Tensor>> listed(const NamedTensors& tensors) {
  std::vector<std::pair<std::string, at::Tensor>> list;
  for (const auto& item : tensors) list.emplace_back(item.key(), item.value());
  return list;
}

absl::Status named(const std::string& path, const absl::Status& status) {
  return make_error(exit_code_of(status), path + ": " + message_of(status));
}

/// Brings the values of files into an Engine. Every rank makes an ImportToEngine, and all ranks make the same calls.
/// Only rank 0 reads.
class ImportToEngine {
 public:
  ImportToEngine(Training& training, const ImportedFiles& files)
      : training_(training),
        files_(files),
        is_reader_(training.job.mesh.rank() == 0),
        buffers_(listed(whole_tensors(*training.job.module, training.job.strategy.units))) {
    for_each_parameter(training_.units, [&](FlatGroup& group, std::size_t i) { parameters_.push_back({&group, i}); });
  }

  absl::Status run() {
    // Gathered values will be out of date, so they are released. The call of `share` below is a barrier: no rank may
    // still read parts that other ranks write.
    training_.drop_gathered();
    TESSERA_RETURN_IF_ERROR(share("weights looked at", is_reader_ ? look() : absl::OkStatus()));
    const bool was_whole = !training_.values.half_loaded;
    training_.values.half_loaded = true;
    // If a read fails, all ranks get the error (`send`). A failure on only one rank is an exception, which ends the
    // group.
    const absl::Status sent = share("weights loaded", load());
    if (!sent.ok())
      return make_error(exit_code_of(sent),
                        message_of(sent) +
                            ". The Engine is not as it was: some of its values are the file's already. "
                            "[T0170] hint: make the Engine anew");
    finish();
    training_.values.half_loaded = !was_whole;
    return absl::OkStatus();
  }

 private:
  struct Parameter {
    FlatGroup* group;
    std::size_t index;
    FlatParameter& get() const { return group->parameters[index]; }
  };

  Collectives& control() const { return *training_.job.axes.control; }
  absl::Status share(const char* label, const absl::Status& own) { return share_status(control(), label, own); }

  absl::Status look() {
    return status_from([&]() -> absl::Status {
      std::vector<WantedTensor> wanted;
      for (const Parameter& parameter : parameters_)
        wanted.push_back(
            {parameter.get().name, parameter.get().sizes, flat_type_of(*parameter.group), parameter.get().aliases});
      for (const auto& [name, buffer] : buffers_) wanted.push_back({name, buffer.sizes().vec(), buffer.scalar_type()});
      TESSERA_ASSIGN_OR_RETURN(source_, files_.open(wanted));
      auto matched = match_tensors(*source_, wanted, files_.rules);
      if (!matched.ok()) return named(files_.path, matched.status());
      matched_ = std::move(matched->tensors);
      unused_ = std::move(matched->unused);
      return absl::OkStatus();
    });
  }

  absl::Status load() {
    const Unrecorded unrecorded;
    for (std::size_t i = 0; i < parameters_.size(); ++i) TESSERA_RETURN_IF_ERROR(load_parameter(i));
    for (std::size_t i = 0; i < buffers_.size(); ++i) TESSERA_RETURN_IF_ERROR(load_buffer(i));
    return absl::OkStatus();
  }

  absl::Status load_parameter(std::size_t i) {
    FlatGroup& group = *parameters_[i].group;
    const FlatParameter& parameter = parameters_[i].get();
    const Extent place = group.layout.extent(parameters_[i].index);
    whole_ = at::Tensor();
    for (std::int64_t begin = 0; begin < parameter.numel; begin += kSentElements) {
      const Extent portion{begin, std::min(kSentElements, parameter.numel - begin)};
      const at::Tensor values = at::empty({portion.numel}, at::TensorOptions(flat_type_of(group)));
      TESSERA_RETURN_IF_ERROR(send(parameter.name, values, [&]() -> absl::Status {
        TESSERA_ASSIGN_OR_RETURN(const at::Tensor read, read_portion(i, portion));
        values.copy_(read);
        return absl::OkStatus();
      }));
      write_values(group, values, {place.offset + begin, portion.numel});
    }
    return absl::OkStatus();
  }

  /// Reads elements of parameter `i`, in the order of the flat buffer. Only rank 0 calls it.
  absl::StatusOr<at::Tensor> read_portion(std::size_t i, Extent portion) {
    const FlatParameter& parameter = parameters_[i].get();
    const auto in_rows = c10::contiguous_strides(parameter.sizes);
    const bool as_in_file = !matched_[i].transposed && at::IntArrayRef(parameter.strides) == at::IntArrayRef(in_rows);
    if (as_in_file) return source_->read(matched_[i].name, portion.offset, portion.numel);
    if (!whole_.defined()) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor read, read_whole(*source_, matched_[i]));
      whole_ = at::empty_strided(parameter.sizes, parameter.strides, read.options()).copy_(read);
    }
    return whole_.as_strided({portion.numel}, {1}, portion.offset);
  }

  absl::Status load_buffer(std::size_t i) {
    auto& [name, buffer] = buffers_[i];
    const at::Tensor values = at::empty(buffer.sizes(), at::TensorOptions(buffer.scalar_type()));
    TESSERA_RETURN_IF_ERROR(send(name, values, [&]() -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor read, read_whole(*source_, matched_[parameters_.size() + i]));
      values.copy_(read);
      return absl::OkStatus();
    }));
    buffer.copy_(values);
    return absl::OkStatus();
  }

  /// Lets rank 0 fill `values`, and sends them to all ranks. If rank 0 fails, it sends the failure instead, so that no
  /// rank waits for values.
  template <class Fill>
  absl::Status send(const std::string& name, const at::Tensor& values, const Fill& fill) {
    absl::Status own = is_reader_ ? status_from(fill) : absl::OkStatus();
    std::int64_t failed = own.ok() ? 0 : 1;
    throw_if_error(control().broadcast("weights", &failed, sizeof failed, 0).wait());
    if (failed != 0)
      return own.ok() ? make_error(ExitCode::kIo,
                                   "rank 0 could not read " + name + ". [T0171] hint: rank 0's own message says why")
                      : own;
    if (values.numel() > 0) throw_if_error(control().broadcast(name, values.data_ptr(), values.nbytes(), 0).wait());
    return absl::OkStatus();
  }

  void finish() {
    training_.accept_new_values();
    training_.sync.adopt();
    if (is_reader_) log_import(files_.path, matched_.size(), unused_);
  }

  Training& training_;
  const ImportedFiles& files_;
  const bool is_reader_;
  std::vector<Parameter> parameters_;
  std::vector<std::pair<std::string, at::Tensor>> buffers_;
  std::unique_ptr<TensorSource> source_;  ///< rank 0 only
  std::vector<MatchedTensor> matched_;    ///< rank 0 only: parameters, then buffers
  std::string unused_;                    ///< rank 0 only: MatchedTensors::unused
  at::Tensor whole_;                      ///< rank 0 only: a parameter whose elements the file has in another order
};

}  // namespace

void EngineSafetensors::expect_between_steps(const char* what) const {
  expect(training_.window.microbatch == 0, what,
         " between backward and step. [T0172] hint: call step() or zero_grad() first");
  training_.expect_weights(what);
  expect(training_.values.open_guards == 0, what, " under a Gathered guard. [T0173] hint: close that guard first");
}

void EngineSafetensors::import_from(const ImportedFiles& files) {
  expect_between_steps(files.call);
  training_.bring_replicas_together(files.call);
  throw_if_error(training_.job.or_abort(files.call, [&] {
    training_.expect_parameters();
    training_.settle_commit();
    return ImportToEngine(training_, files).run();
  }));
}

std::vector<std::pair<std::string, at::Tensor>> named_tensors(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> named = listed(module.named_parameters());
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) named.emplace_back(item.key(), item.value());
  }
  return named;
}

ModuleTensors wanted_by(const std::vector<std::pair<std::string, at::Tensor>>& named) {
  ModuleTensors result;
  for (const auto& [name, tensor] : named) {
    const auto tied =
        std::ranges::find_if(result.tensors, [&](const at::Tensor& each) { return each.is_same(tensor); });
    if (tied != result.tensors.end()) {
      result.wanted[static_cast<std::size_t>(tied - result.tensors.begin())].aliases.push_back(name);
      continue;
    }
    result.tensors.push_back(tensor);
    result.wanted.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  }
  return result;
}

void log_import(const std::string& path, std::size_t tensors, const std::string& unused) {
  log_info("weights of " + path + ": " + std::to_string(tensors) + " tensors" + (unused.empty() ? "" : "; ") + unused);
}

void import_safetensors(Engine& engine, const std::filesystem::path& path, const ImportOptions& options) {
  EngineSafetensors(engine).import_from(
      {"import_safetensors", path.string(), rules_of(options),
       [&](const std::vector<WantedTensor>&) { return open_safetensors(path.string(), "rank 0"); }});
}

void import_safetensors(torch::nn::Module& module, const std::filesystem::path& path, const ImportOptions& options) {
  const at::NoGradGuard no_grad;
  const auto source = value_or_throw(open_safetensors(path.string(), "import_safetensors"));
  ModuleTensors into = wanted_by(named_tensors(module));
  const auto matched = match_tensors(*source, into.wanted, rules_of(options));
  if (!matched.ok()) throw error_of(named(path.string(), matched.status()));
  for (std::size_t i = 0; i < into.tensors.size(); ++i)
    into.tensors[i].copy_(value_or_throw(read_whole(*source, matched->tensors[i])));
  if (!matched->unused.empty()) log_import(path.string(), into.tensors.size(), matched->unused);
}

}  // namespace tessera
