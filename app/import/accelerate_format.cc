// Accelerate: the file of `accelerate config`. Rows call its own keys "accelerate.num_processes", those in fsdp_config
// "fsdp.version", and those in deepspeed_config as DeepSpeed's file has them.

#include <algorithm>
#include <map>

#include "app/import/import_formats.h"
#include "runtime/base/text.h"

namespace tessera::app {
namespace {

const std::string kOwn = "accelerate.", kInline = "deepspeed_config.";

const std::map<std::string, std::string>& inline_names() {
  static const std::map<std::string, std::string> names = {
      {"gradient_accumulation_steps", "gradient_accumulation_steps"},
      {"gradient_clipping", "gradient_clipping"},
      {"zero_stage", "zero_optimization.stage"},
      {"offload_optimizer_device", "zero_optimization.offload_optimizer.device"},
      {"offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"},
      {"offload_param_device", "zero_optimization.offload_param.device"},
      {"offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"},
      {"zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
  };
  return names;
}

std::string kind_of(const ImportSession& session) {
  const JsonNode* kind = session.find("accelerate.distributed_type");
  if (kind == nullptr || bool_of(*kind) == false) return "no";  // a plain `NO` of YAML is false
  return word_of(*kind);
}

bool is_plain(const std::string& kind) { return kind == "no" || kind == "multi_cpu" || kind == "multi_gpu"; }

constexpr char kDevices[] = "Tessera trains on CPUs and NVIDIA GPUs";

void distributed_type(ImportSession& session, const ConfigKey& key) {
  const std::string kind = kind_of(session);
  if (kind == "fsdp" || kind == "deepspeed") return session.mapped(key, "the keys of " + kind + "_config");
  if (is_plain(kind)) {
    session.put(key, "/strategy", "NO_SHARD");
    return;
  }
  if (kind == "megatron_lm")
    return session.refused(key, "Tessera has no tensor or pipeline parallelism. Use distributed_type FSDP");
  for (const char* other :
       {"xla", "tpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_sdaa", "multi_musa", "multi_hpu", "multi_neuron"})
    if (kind == other) return session.refused(key, kDevices);
  session.refused(key, "must be FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU or NO");
}

// FSDP and DeepSpeed keep parameters in 16 bits; beside DDP the word means autocast.
void put_precision(ImportSession& session, const ConfigKey& key, const std::string& dtype) {
  if (dtype != "bf16" && dtype != "fp16")
    return session.refused(key, "must be no, bf16 or fp16: Tessera computes in no other types");
  if (is_plain(kind_of(session)))
    return session.refused(key,
                           "beside DDP this is autocast, which is the program's: keep it there, and say no here. "
                           "Parameters in 16 bits with fp32 masters "
                           "are \"mixed_precision\": {\"param\": \"" +
                               dtype + "\"}");
  session.put(key, "/mixed_precision/param", dtype,
              kind_of(session) == "fsdp"
                  ? "Autocast, which Accelerate adds and which keeps some operators in fp32, is the program's"
                  : "");
}

void mixed_precision(ImportSession& session, const ConfigKey& key) {
  const std::string word = word_of(*key.node);
  if (bool_of(*key.node) == false || word == "fp32") return session.ignored(key, "parameters are fp32, as in Tessera");
  put_precision(session, key, word);
}

// Before mixed_precision there was this.
void old_fp16(ImportSession& session, const ConfigKey& key) {
  if (bool_of(*key.node) == false) return session.ignored(key, "parameters are fp32, as in Tessera");
  if (session.find("accelerate.mixed_precision") != nullptr)
    return session.ignored(key, "mixed_precision says the type");
  put_precision(session, key, "fp16");
}

void no_compiler(ImportSession& session, const ConfigKey& key) {
  if (bool_of(*key.node) == false) return session.ignored(key, "off");
  session.refused(key, "Tessera runs the module as it is, without torch.compile. Set it to NO");
}

bool is_compiled(const ImportSession& session) {
  for (const char* name : {"accelerate.dynamo_config.dynamo_backend", "accelerate.dynamo_backend"}) {
    const JsonNode* backend = session.find(name);
    if (backend != nullptr && bool_of(*backend) != false) return true;
  }
  return false;
}

void compiler_option(ImportSession& session, const ConfigKey& key) {
  if (!is_compiled(session)) return session.ignored(key, "dynamo_backend is NO");
  session.refused(key, "belongs to dynamo_backend");
}

// Of keys that say something only where they are not empty, "", false or 0.
ImportRow empty_only(const std::string& name, const std::string& refusal) {
  return by_rule(kOwn + name, "ignored where it is empty or false; else refused: " + refusal,
                 [refusal](ImportSession& session, const ConfigKey& key) {
                   const bool empty_text =
                       key.node->value.is_string() && key.node->value.get_ref<const std::string&>().empty();
                   const bool empty_list = (key.node->is_list() || key.node->is_object()) && key.node->children.empty();
                   if (empty_text || empty_list || bool_of(*key.node) == false || number_of(*key.node) == 0.0)
                     return session.ignored(key, "off");
                   session.refused(key, refusal);
                 });
}

ImportRow launcher_says(const std::string& name, const std::string& who) {
  return ignores(kOwn + name, "the launcher says it: " + who);
}

std::vector<ImportRow> launch_rows() {
  return {
      launcher_says("num_processes", "`tessera launch -n N`, torchrun, srun or mpirun"),
      launcher_says("num_machines", "torchrun, srun or mpirun"),
      launcher_says("machine_rank", "torchrun, srun or mpirun"),
      launcher_says("main_process_ip", "torchrun, srun or mpirun"),
      launcher_says("main_process_port", "`tessera launch --port P`, torchrun, srun or mpirun"),
      launcher_says("rdzv_backend", "torchrun, srun or mpirun"),
      launcher_says("rdzv_conf", "torchrun, srun or mpirun"),
      launcher_says("same_network", "torchrun, srun or mpirun"),
      launcher_says("main_training_function", "it starts a program"),
      launcher_says("gpu_ids", "CUDA_VISIBLE_DEVICES"),
      launcher_says("num_cpu_threads_per_process", "OMP_NUM_THREADS, and without it ranks share a host's cores evenly"),
      launcher_says("enable_cpu_affinity", "numactl or the launcher binds ranks to cores"),
      launcher_says("mpirun_config.*", "mpirun starts ranks of Tessera as they are"),
      launcher_says("max_restarts", "`tessera launch --max-restarts`"),
      ignores(kOwn + "use_cpu", "comm.transport says it: \"auto\" trains on the CPU, \"nccl\" on GPUs"),
      ignores(kOwn + "debug", "ranks compare their calls always; the strategy's \"check\" has more"),
      ignores(kOwn + "deepspeed_hostfile", "the launcher says it"),
  };
}

std::vector<ImportRow> device_rows() {
  return {
      expects(kOwn + "downcast_bf16", false, "off", "it is for TPUs. Use mixed_precision bf16"),
      empty_only("tpu_name", kDevices),
      empty_only("tpu_zone", kDevices),
      empty_only("tpu_use_cluster", kDevices),
      empty_only("tpu_use_sudo", kDevices),
      empty_only("tpu_vm", kDevices),
      empty_only("tpu_env", kDevices),
      empty_only("command_file", kDevices),
      empty_only("commands", kDevices),
      empty_only("use_xpu", kDevices),
      empty_only("ipex_config.ipex",
                 "IPEX changes the module and its optimizer. Tessera's update loops use AVX2 and AVX-512 as they are"),
      empty_only("ipex_config.use_xpu", kDevices),
      refuses(kOwn + "fp8_config.*", "Tessera computes in fp32, bf16 and fp16"),
      refuses(kOwn + "megatron_lm_config.*",
              "Tessera has no tensor or pipeline parallelism. Use distributed_type FSDP"),
      by_rule(kOwn + "dynamo_backend", "NO: ignored; else refused, as Tessera runs the module as it is", no_compiler),
      by_rule(kOwn + "dynamo_config.dynamo_backend", "NO: ignored; else refused, as Tessera runs the module as it is",
              no_compiler),
      by_rule(kOwn + "dynamo_config.*", "ignored while dynamo_backend is NO; else refused", compiler_option),
  };
}

void replicas(ImportSession& session, const ConfigKey& key) {
  if (integer_of(*key.node) == 1) return session.ignored(key, "parameters are not replicated");
  session.put(key, "/mesh/replicate", json_of(*key.node));
}

void shards(ImportSession& session, const ConfigKey& key) {
  if (integer_of(*key.node) == 1) return session.ignored(key, "parameters are not sharded by it");
  session.put(key, "/mesh/shard", json_of(*key.node));
}

std::vector<ImportRow> parallel_rows() {
  const std::string prefix = kOwn + "parallelism_config.parallelism_config_";
  const std::string refusal =
      "Tessera shards data-parallel training, and has no tensor, context or sequence parallelism";
  return {
      by_rule(prefix + "dp_replicate_size", "`mesh.replicate`; with FULL_SHARD the strategy is HYBRID_SHARD", replicas),
      by_rule(prefix + "dp_shard_size", "`mesh.shard`", shards),
      expects(prefix + "tp_size", 1.0, "off", refusal),
      expects(prefix + "cp_size", 1.0, "off", refusal),
      expects(prefix + "sp_size", 1.0, "off", refusal),
      ignores(kOwn + "parallelism_config.*", "it belongs to tensor, context or sequence parallelism, which are off"),
  };
}

std::vector<ImportRow> inline_rows() {
  std::vector<ImportRow> rows;
  const ImportFormat deepspeed = deepspeed_format();
  for (const auto& [name, row_name] : inline_names()) {
    rows.push_back(*row_of(deepspeed.rows, row_name));
    rows.back().shown = kInline + name;
  }
  return std::move(rows) +
         std::vector<ImportRow>{
             ignores(kInline + "zero3_init_flag", "deferred_init makes no rank hold the whole model"),
             refuses(kInline + "deepspeed_config_file", "import that file: `tessera import-config FILE`"),
             ignores(kInline + "deepspeed_multinode_launcher", "the launcher says it: torchrun, srun or mpirun"),
             ignores(kInline + "deepspeed_hostfile", "the launcher says it: torchrun, srun or mpirun"),
             ignores(kInline + "deepspeed_inclusion_filter", "the launcher says it: torchrun, srun or mpirun"),
             ignores(kInline + "deepspeed_exclusion_filter", "the launcher says it: torchrun, srun or mpirun"),
             ignores(kInline + "deepspeed_moe_layer_cls_names",
                     "a unit is gathered as a whole: units.classes says which modules are units"),
         };
}

std::string row_name(const std::string& path) {
  if (path == "fsdp_config") return "fsdp";
  if (path.starts_with("fsdp_config.")) return fsdp_row_name(path);
  if (path != "deepspeed_config" && !path.starts_with(kInline)) return kOwn + path;
  if (path == "deepspeed_config") return path;
  const auto known = inline_names().find(path.substr(kInline.size()));
  return known == inline_names().end() ? path : known->second;
}

// What the rows of sections leave to defaults. A section counts only where distributed_type asks for it.
void finish_accelerate(ImportSession& session) {
  const std::string kind = kind_of(session);
  if (kind == "fsdp") {
    if (session.is_set("/mixed_precision/param"))
      session.imply("/mixed_precision/reduce", session.settings().at("/mixed_precision/param"),
                    "Accelerate takes one type for parameters and gradients");
    return finish_fsdp(session);
  }
  if (kind == "deepspeed") {
    session.imply("/strategy", "SHARD_GRADIENTS", "Accelerate's default is stage 2");
    finish_deepspeed_zero(session);
    finish_deepspeed_precision(session);
    finish_deepspeed_optimizer(session);
    return finish_deepspeed_clipping(session);
  }
  if (!is_plain(kind) || session.find("accelerate.distributed_type") == nullptr) return;
  if (kind != "no") {
    session.imply("/broadcast_buffers", "from_rank_zero", "DDP's default");
    session.imply("/units/bucket_cap_mb", 25, "DDP's default");
  }
  session.note(
      "Optimizer, learning rate, clipping and schedule are the training program's. Say them in the strategy's "
      "\"optimizer\", \"gradient_clipping\" and "
      "\"lr_schedule\"; TesseraTrainer takes them from TrainingArguments.");
}

// A section that distributed_type does not ask for is not read, by Accelerate either.
ImportRow counts_with(ImportRow row, const std::string& kind) {
  row.apply = [kind, apply = std::move(row.apply)](ImportSession& session, const ConfigKey& key) {
    if (kind_of(session) != kind) return session.ignored(key, "distributed_type is not " + kind);
    apply(session, key);
  };
  return row;
}

}  // namespace

ImportFormat accelerate_format() {
  std::vector<ImportRow> rows = {
      expects(kOwn + "compute_environment", "local_machine", "ranks run where the launcher starts them",
              "Tessera does not start jobs on SageMaker. Start ranks there with torchrun"),
      by_rule(kOwn + "distributed_type",
              "FSDP, DEEPSPEED: their sections; MULTI_GPU, MULTI_CPU, NO: `strategy` \"NO_SHARD\"; else refused",
              distributed_type),
      by_rule(kOwn + "mixed_precision",
              "bf16, fp16: `mixed_precision.param` and `mixed_precision.reduce`, but refused beside DDP, where it is "
              "autocast; no: ignored",
              mixed_precision),
      by_rule(kOwn + "fp16", "as mixed_precision fp16, in old files", old_fp16),
  };
  rows = std::move(rows) + launch_rows() + device_rows() + parallel_rows();
  for (ImportRow& row : rows) row.shown = row.name.substr(kOwn.size());
  for (ImportRow& row : inline_rows()) rows.push_back(counts_with(std::move(row), "deepspeed"));
  for (ImportRow& row : fsdp_rows()) {
    row.shown = "fsdp_config.fsdp_" + row.name.substr(5);
    rows.push_back(counts_with(std::move(row), "fsdp"));
  }
  return {"accelerate", "an Accelerate configuration", std::move(rows), row_name, finish_accelerate};
}

}  // namespace tessera::app
