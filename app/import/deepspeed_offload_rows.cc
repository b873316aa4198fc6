// DeepSpeed: "zero_optimization.offload_optimizer", "offload_param" and their older forms.

#include "app/import/import_formats.h"

namespace tessera::app {

const char kHostTierByHand[] =
    "what it means depends on the device. Training on the CPU, leave this out: its memory is the host's. On a GPU set "
    "offload.moments.tier \"host\", and with bf16 or fp16 offload.masters.tier too; for what FSDP's CPU offload does, "
    "with "
    "FULL_SHARD, also offload.parameters.tier and offload.gradients.tier, and offload.step \"cpu\"";

namespace {

const std::string kStates = "zero_optimization.offload_optimizer.", kParameters = "zero_optimization.offload_param.";

std::string device_of(const ImportSession& session, const std::string& section) {
  const JsonNode* device = session.find(section + "device");
  return device == nullptr ? "none" : word_of(*device);
}

bool has_nvme_path(const ImportSession& session, const std::string& section) {
  const JsonNode* path = session.find(section + "nvme_path");
  return path != nullptr && path->value.is_string() && !path->value.get_ref<const std::string&>().empty() &&
         word_of(*path) != "none";
}

bool has_masters(const ImportSession& session) {
  return deepspeed_trains_in(session, "bf16") || deepspeed_trains_in(session, "fp16");
}

// none and cpu, which both need no more; true: the device is nvme.
bool is_nvme(ImportSession& session, const ConfigKey& key, const std::string& section) {
  const std::string device = word_of(*key.node);
  if (device == "none") session.ignored(key, "not offloaded");
  if (device == "cpu") session.refused(key, kHostTierByHand);
  if (device == "none" || device == "cpu") return false;
  if (device != "nvme") session.refused(key, "must be none, cpu or nvme");
  if (device == "nvme" && !has_nvme_path(session, section))
    session.refused(key, "nvme_path is missing: it becomes offload.paths");
  return device == "nvme" && has_nvme_path(session, section);
}

void states_device(ImportSession& session, const ConfigKey& key) {
  if (!is_nvme(session, key, kStates)) return;
  if (!session.put(key, "/offload/moments/tier", "nvme", has_masters(session) ? "offload.masters.tier = \"nvme\"" : ""))
    return;
  if (has_masters(session)) session.set("/offload/masters/tier", "nvme");
}

void parameters_device(ImportSession& session, const ConfigKey& key) {
  if (!is_nvme(session, key, kParameters)) return;
  const JsonNode* stage = session.find("zero_optimization.stage");
  if (stage == nullptr || integer_of(*stage) != 3)
    return session.refused(key, "parameters are offloaded with stage 3 only, in DeepSpeed and in Tessera");
  session.put(key, "/offload/parameters/tier", "nvme");
}

void nvme_path(ImportSession& session, const ConfigKey& key, const std::string& section) {
  if (device_of(session, section) != "nvme") return session.ignored(key, "the device is not nvme");
  if (!has_nvme_path(session, section)) return session.refused(key, "must be the path of a directory on a local disk");
  nlohmann::json paths =
      session.is_set("/offload/paths") ? session.settings().at("/offload/paths") : nlohmann::json::array();
  bool is_new = true;
  for (const nlohmann::json& path : paths) is_new = is_new && path != key.node->value;
  if (is_new) paths.push_back(key.node->value);
  session.put(key, "/offload/paths", paths,
              paths.size() > 1 ? "Difference: parameters and states are spread over all paths" : "");
}

void states_ratio(ImportSession& session, const ConfigKey& key) {
  if (device_of(session, kStates) != "nvme") return session.ignored(key, "the device is not nvme");
  const std::string more = has_masters(session) ? "offload.masters.fraction is the same" : "";
  const std::optional<double> ratio = number_of(*key.node);
  if (session.put(key, "/offload/moments/fraction", ratio ? nlohmann::json(*ratio) : json_of(*key.node), more) &&
      has_masters(session))
    session.set("/offload/masters/fraction", *ratio);
}

std::vector<ImportRow> rows_of_both(const std::string& section) {
  return {
      by_rule(section + "nvme_path", "`offload.paths`, while the device is nvme",
              [section](ImportSession& session, const ConfigKey& key) { nvme_path(session, key, section); }),
      ignores(section + "pin_memory", "Tessera allocates what moves to and from disks as they need it"),
      ignores(section + "buffer_count", "offload.queue_depth says how many records are read ahead and written behind"),
      ignores(section + "buffer_size", "offload.record says how much a record holds; the plan sizes all buffers"),
  };
}

ImportRow old_offload(const std::string& name) {
  return by_rule("zero_optimization." + name,
                 "true: refused, as it depends on the device that trains (the form of old files)",
                 [](ImportSession& session, const ConfigKey& key) {
                   if (bool_of(*key.node) == false) return session.ignored(key, "not offloaded");
                   session.refused(key, kHostTierByHand);
                 });
}

}  // namespace

std::vector<ImportRow> deepspeed_offload_rows() {
  const std::string refused_cpu = "; cpu: refused, as it depends on the device that trains";
  return std::vector<ImportRow>{
             by_rule(kStates + "device",
                     "nvme: `offload.moments.tier` \"nvme\", and with bf16 or fp16 `offload.masters.tier` too" +
                         refused_cpu,
                     states_device),
             by_rule(kStates + "ratio",
                     "`offload.moments.fraction` and `offload.masters.fraction`, while the device is nvme",
                     states_ratio),
             ignores(kStates + "pipeline_read", "records are read ahead always; offload.queue_depth says how far"),
             ignores(kStates + "pipeline_write", "records are written behind always; offload.queue_depth says how far"),
             ignores(kStates + "pipeline", "records are read ahead and written behind always"),
             ignores(kStates + "fast_init", "it changes how states are set up"),
             expects(kStates + "super_offload", false, "off", kHostTierByHand),
             ignores(kStates + "cpuadam_cores_perc",
                     "ranks share the cores of a host evenly; OMP_NUM_THREADS says otherwise"),
             by_rule(kParameters + "device", "nvme, with stage 3: `offload.parameters.tier` \"nvme\"" + refused_cpu,
                     parameters_device),
             ignores(kParameters + "max_in_cpu", "offload.cache says how many bytes of records stay in memory"),
             old_offload("cpu_offload"),
             old_offload("cpu_offload_params"),
             old_offload("cpu_offload_param"),
             ignores("zero_optimization.cpu_offload_use_pin_memory", "it belongs to offload in the host's memory"),
         } +
         rows_of_both(kStates) + rows_of_both(kParameters);
}

}  // namespace tessera::app
