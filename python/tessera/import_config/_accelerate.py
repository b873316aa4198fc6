"""Defines the rows of Accelerate, for the file that `accelerate config` writes.

The names of Accelerate's own keys begin with "accelerate." here ("accelerate.num_processes"), and those of keys in
fsdp_config with "fsdp." ("fsdp.version"). Keys in deepspeed_config have the names of DeepSpeed's file.
"""

from tessera.import_config import _deepspeed, _fsdp
from tessera.import_config._rows import Format, Row, Rule, below, expects, guarded, ignores, refuses, rule
from tessera.import_config._session import Key, Session
from tessera.import_config._values import boolean, integer, number, word

_OWN, _INLINE = "accelerate.", "deepspeed_config."
_INLINE_NAMES = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_stage": "zero_optimization.stage"}
_PLAIN = ("no", "multi_cpu", "multi_gpu")
_ELSEWHERE = ("xla", "tpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_sdaa", "multi_musa", "multi_hpu", "multi_neuron")
_DEVICES = "Tessera trains on CPUs and NVIDIA GPUs"
_AS_IT_IS = "Tessera runs the module as it is, without torch.compile"
_PARALLEL = "Tessera shards data-parallel training, and has no tensor, context or sequence parallelism"
_NO_MEGATRON = "Tessera has no tensor or pipeline parallelism. Use distributed_type FSDP"


def _kind_of(session: Session) -> str:
    kind = session.find("accelerate.distributed_type")
    return "no" if kind is None or boolean(kind) is False else word(kind)  # YAML reads a plain `NO` as false


def _distributed_type(key: Key) -> None:
    kind = _kind_of(key.session)
    if kind in ("fsdp", "deepspeed"):
        key.mapped(f"the keys of {kind}_config")
    elif kind in _PLAIN:
        key.put("/strategy", "NO_SHARD")
    else:
        key.refused(_NO_MEGATRON if kind == "megatron_lm" else _DEVICES if kind in _ELSEWHERE else
                    "must be FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU or NO")


def _put_precision(key: Key, dtype: str) -> None:
    """Sets the precision. FSDP and DeepSpeed keep parameters in 16 bits; with DDP "mixed_precision" means autocast."""
    if boolean(key.value) is False or dtype == "fp32":
        key.ignored("parameters are fp32, as in Tessera")
    elif dtype not in ("bf16", "fp16"):
        key.refused("must be no, bf16 or fp16: Tessera computes in no other types")
    elif _kind_of(key.session) in _PLAIN:
        key.refused("beside DDP this is autocast, which is the program's: keep it there, and say no here. Parameters in 16 bits with fp32 masters "
                    f'are "mixed_precision": {{"param": "{dtype}"}}')
    else:
        key.put("/mixed_precision/param", dtype, "Autocast, which Accelerate adds and which keeps some operators in fp32, is the program's"
                if _kind_of(key.session) == "fsdp" else "")


def _old_fp16(key: Key) -> None:
    """Handles "fp16", a key that older files have instead of mixed_precision."""
    said = boolean(key.value) is not False and key.session.find("accelerate.mixed_precision") is not None
    key.ignored("mixed_precision says the type") if said else _put_precision(key, "fp16")


def _no_compiler(key: Key) -> None:
    key.ignored("off") if boolean(key.value) is False else key.refused(f"{_AS_IT_IS}. Set it to NO")


def _compiler_option(key: Key) -> None:
    backends = (key.session.find(_OWN + name) for name in ("dynamo_config.dynamo_backend", "dynamo_backend"))
    is_compiled = any(backend is not None and boolean(backend) is not False for backend in backends)
    key.refused("belongs to dynamo_backend") if is_compiled else key.ignored("dynamo_backend is NO")


def _empty_only(keys: str, refusal: str) -> list[Row]:
    """Makes rows for keys that do nothing if they are empty, "", false or 0. Other values are refused."""
    def apply(key: Key) -> None:
        off = key.value in ("", [], {}) or boolean(key.value) is False or number(key.value) == 0
        key.ignored("off") if off else key.refused(refusal)
    return [Row(name, f"ignored where it is empty or false; else refused: {refusal}", apply) for name in keys.split()]


def _parallel_size(name: str, doc: str, pointer: str, why: str) -> list[Row]:
    return rule(f"parallelism_config.parallelism_config_{name}", doc, lambda key: (
        key.ignored(why) if integer(key.value) == 1 else key.put_number(pointer)))


def _launched(keys: str, who: str) -> list[Row]:
    return ignores(keys, f"the launcher says it: {who}")


_LAUNCHERS = "torchrun, srun or mpirun"
_OWN_ROWS = below(
    _OWN,
    expects("compute_environment", "local_machine", "ranks run where the launcher starts them",
            "Tessera does not start jobs on SageMaker. Start ranks there with torchrun"),
    rule("distributed_type", 'FSDP, DEEPSPEED: their sections; MULTI_GPU, MULTI_CPU, NO: `strategy` "NO_SHARD"; else refused', _distributed_type),
    rule("mixed_precision", "bf16, fp16: `mixed_precision.param` and `mixed_precision.reduce`, but refused beside DDP, where it is autocast; no: "
         "ignored", lambda key: _put_precision(key, word(key.value))),
    rule("fp16", "as mixed_precision fp16, in old files", _old_fp16),
    _launched("num_processes", "`tessera launch -n N`, torchrun, srun or mpirun"),
    _launched("num_machines machine_rank main_process_ip rdzv_backend rdzv_conf same_network deepspeed_hostfile", _LAUNCHERS),
    _launched("main_process_port", "`tessera launch --port P`, torchrun, srun or mpirun"),
    _launched("main_training_function", "it starts a program"),
    _launched("gpu_ids", "CUDA_VISIBLE_DEVICES"),
    _launched("num_cpu_threads_per_process", "OMP_NUM_THREADS, and without it ranks share a host's cores evenly"),
    _launched("enable_cpu_affinity", "numactl or the launcher binds ranks to cores"),
    _launched("mpirun_config.*", "mpirun starts ranks of Tessera as they are"),
    _launched("max_restarts", "`tessera launch --max-restarts`"),
    ignores("use_cpu", 'comm.transport says it: "auto" trains on the CPU, "nccl" on GPUs'),
    ignores("debug", 'ranks compare their calls always; the strategy\'s "check" has more'),
    expects("downcast_bf16", False, "off", "it is for TPUs. Use mixed_precision bf16"),
    _empty_only("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands use_xpu ipex_config.use_xpu", _DEVICES),
    _empty_only("ipex_config.ipex", "IPEX changes the module and its optimizer. Tessera's update loops use AVX2 and AVX-512 as they are"),
    refuses("fp8_config.*", "Tessera computes in fp32, bf16 and fp16"),
    refuses("megatron_lm_config.*", _NO_MEGATRON),
    rule("dynamo_backend", f"NO: ignored; else refused: {_AS_IT_IS}", _no_compiler),
    rule("dynamo_config.dynamo_backend", f"NO: ignored; else refused: {_AS_IT_IS}", _no_compiler),
    rule("dynamo_config.*", "ignored while dynamo_backend is NO; else refused", _compiler_option),
    _parallel_size("dp_replicate_size", "`mesh.replicate`; with FULL_SHARD the strategy is HYBRID_SHARD", "/mesh/replicate",
                   "parameters are not replicated"),
    _parallel_size("dp_shard_size", "`mesh.shard`", "/mesh/shard", "parameters are not sharded by it"),
    below("parallelism_config.parallelism_config_", expects("tp_size cp_size sp_size", 1.0, "off", _PARALLEL)),
    ignores("parallelism_config.*", "it belongs to tensor, context or sequence parallelism, which are off"))
_INLINE_ROWS = [_deepspeed.FORMAT.row_of(name)._replace(shown=_INLINE + shown) for shown, name in _INLINE_NAMES.items()] + below(
    _INLINE,
    ignores("zero3_init_flag", "deferred_init makes no rank hold the whole model"),
    refuses("deepspeed_config_file", "import that file: python -m tessera.import_config FILE"),
    _launched("deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter", _LAUNCHERS),
    ignores("deepspeed_moe_layer_cls_names", "a unit is gathered as a whole: units.classes says which modules are units"))


def _counts_with(kind: str, rows: list[Row]) -> list[Row]:
    """Makes rows of a section that Accelerate reads only if distributed_type selects this section."""
    def guard(key: Key, apply: Rule) -> None:
        apply(key) if _kind_of(key.session) == kind else key.ignored(f"distributed_type is not {kind}")
    return guarded(guard, rows)


def _row_name(path: str) -> str:
    if path == "fsdp_config":
        return "fsdp"
    if path.startswith("fsdp_config."):
        return _fsdp.row_name(path)
    if path == "deepspeed_config" or path.startswith(_INLINE):
        return _INLINE_NAMES.get(path.removeprefix(_INLINE), path)
    return _OWN + path


def _finish(session: Session) -> None:
    """Sets the values that the file's sections leave to Accelerate's defaults. A section has an effect only if
    distributed_type selects it."""
    kind = _kind_of(session)
    if kind == "fsdp":
        _fsdp.finish_fsdp(session, default_version=1)
    elif kind == "deepspeed":
        session.imply("/strategy", "SHARD_GRADIENTS", "Accelerate's default is stage 2")
        for part in (_deepspeed.finish_zero, _deepspeed.finish_types, _deepspeed.finish_optimizer, _deepspeed.finish_clipping):
            part(session)
    elif kind in _PLAIN and session.find("accelerate.distributed_type") is not None:
        if kind != "no":
            session.imply("/broadcast_buffers", "from_rank_zero", "DDP's default")
            session.imply("/units/bucket_cap_mb", 25, "DDP's default")
        session.notes.append(_fsdp.PROGRAM_NOTE)


def _with_titles() -> list[Row]:
    return [row._replace(shown=row.name.removeprefix(_OWN)) for row in _OWN_ROWS] + _counts_with("deepspeed", _INLINE_ROWS) + [
        row._replace(shown=f"fsdp_config.fsdp_{row.name.removeprefix('fsdp.')}") for row in _counts_with("fsdp", _fsdp.ROWS)]


FORMAT = Format("accelerate", "an Accelerate configuration",
                "Accelerate (`--format accelerate`)\n\nKeys of `fsdp_config` count with `distributed_type: FSDP`, those of `deepspeed_config` with "
                "`distributed_type: DEEPSPEED`.", _with_titles(), _row_name, _finish)
