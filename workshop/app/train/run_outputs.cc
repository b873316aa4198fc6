#include "workshop/app/train/run_outputs.h"

#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>

#include "runtime/base/metrics/metrics_form.h"
#include "runtime/base/status.h"

namespace tessera::app {
namespace {

std::string utc_text(const char* format) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[64];
  std::strftime(text, sizeof text, format, &parts);
  return text;
}

std::string new_run_id() {
  char random[8];
  std::snprintf(random, sizeof random, "%04x", std::random_device()() & 0xffffu);
  return utc_text("%Y%m%d-%H%M%S-") + random;
}

}  // namespace

std::string utc_now() { return utc_text("%Y-%m-%dT%H:%M:%SZ"); }

RunOutputs outputs_of(const TrainCommand& command, int restart_count, bool resumes) {
  RunOutputs outputs;
  outputs.is_restart = restart_count > 0 || resumes;
  if (command.outputs.overwrite || outputs.is_restart) outputs.existing = Existing::kReplaced;
  outputs.run_id = new_run_id();
  const std::filesystem::path folder = command.outputs.folder;
  // An absolute path does not change when it is joined to a folder.
  const auto place = [&](const std::string& path, const char* standard) {
    if (!path.empty()) return folder / path;
    return folder.empty() || !standard ? std::filesystem::path() : folder / standard;
  };
  if (!folder.empty()) outputs.config = folder / "config.json";
  outputs.metrics = place(command.outputs.metrics, "metrics.jsonl");
  if (!command.outputs.tensorboard.empty())
    outputs.events = place(command.outputs.tensorboard, nullptr) / event_file_name();
  outputs.trace = place(command.outputs.trace, nullptr);
  outputs.operators = place(command.outputs.trace_operators, nullptr);
  outputs.profile = place(command.outputs.profile, nullptr);
  outputs.weights = place(command.outputs.save_weights, "weights.pt");
  outputs.hf = place(command.outputs.export_hf, nullptr);
  return outputs;
}

absl::Status check_outputs(const TrainCommand& command, const RunOutputs& outputs) {
  const auto option = [&](const std::string& given, const char* name) { return given.empty() ? "--out" : name; };
  std::vector<NamedPath> inputs = {{"--model", command.model},
                                   {"--strategy", command.strategy},
                                   {"--init-from", command.init_from},
                                   {"--load-weights", command.load_weights.path},
                                   {"--predict-links", command.predicted_by.links},
                                   {"--predict-profile", command.predicted_by.profile}};
  for (const auto& [name, data] :
       {std::pair("--data", command.data.path), std::pair("--eval-data", command.evaluation.data)}) {
    if (data.empty()) continue;
    inputs.push_back({name, data, command.data.extensions});
    // Megatron's data are two files. The command line names one of the files, or their common prefix.
    for (const char* extension : {".idx", ".bin"}) {
      inputs.push_back({name, data + extension});
      inputs.push_back({name, std::filesystem::path(data).replace_extension(extension)});
    }
  }
  return check_outputs({{"--out", outputs.config},
                        {option(command.outputs.metrics, "--metrics"), outputs.metrics},
                        {"--tensorboard", outputs.events},
                        {"--trace", outputs.trace},
                        {"--trace-operators", outputs.operators},
                        {"--profile", outputs.profile},
                        {option(command.outputs.save_weights, "--save-weights"), outputs.weights},
                        {"--export-hf", outputs.hf.empty() ? outputs.hf : outputs.hf / "config.json"},
                        {"--export-hf", outputs.hf.empty() ? outputs.hf : outputs.hf / "model.safetensors"}},
                       inputs, outputs.existing);
}

absl::Status write_config(const RunOutputs& outputs, const TrainCommand& command, const Strategy& strategy,
                          const models::ModelConfig& model, const Topology& topology) {
  if (outputs.config.empty()) return absl::OkStatus();
  const nlohmann::ordered_json config = {{"run", outputs.run_id},
                                         {"tessera", TESSERA_VERSION},
                                         {"started", utc_now()},
                                         {"ranks", topology.world_size},
                                         {"hosts", topology.num_hosts()},
                                         {"launcher", topology.launcher},
                                         {"command", command.command_line},
                                         {"strategy", nlohmann::ordered_json::parse(strategy.to_json())},
                                         {"model", nlohmann::ordered_json::parse(models::to_json(model))}};
  const std::string text = config.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  return write_output(outputs.config, text, outputs.existing, "--out");
}

}  // namespace tessera::app
