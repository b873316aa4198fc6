"""Defines the rows of DeepSpeed. The names are those that DeepSpeedConfig reads."""

from collections.abc import Callable

from tessera.import_config._deepspeed_update import OPTIMIZER, SCHEDULER, finish_optimizer, finish_scheduler
from tessera.import_config._rows import (OF_THE_DEVICE, Format, Row, Rule, below, expects, guarded, ignores, put_second_copy, refuses, rule,
                                         sets, switched_off, to_host)
from tessera.import_config._session import Key, Session
from tessera.import_config._values import boolean, integer, number, word

UNITS_NOTE = ('Name the model\'s block in "units", such as {"classes": ["LlamaDecoderLayer"]}. Without units the whole model is gathered at once. '
              "(TesseraTrainer takes the blocks from the model.)")
ACTIVATIONS_DOC = f'false: ignored; true: `offload.activations.tier` "host" {OF_THE_DEVICE}'
_ZERO, _SCALE = "zero_optimization.", "/mixed_precision/loss_scale/"
_STATES, _PARAMETERS = _ZERO + "offload_optimizer.", _ZERO + "offload_param."
_STAGES = ["NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "FULL_SHARD"]
_SIZES = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]


def trains_in(session: Session, *dtypes: str) -> bool:
    """Returns whether training uses one of `dtypes` ("fp16", "bf16") in DeepSpeed's way. The section of a dtype can
    enable the dtype, and so can Accelerate's mixed_precision if distributed_type is DeepSpeed."""
    if any(session.is_on(f"{dtype}.enabled") for dtype in dtypes) or "bf16" in dtypes and session.is_on("bfloat16.enabled"):
        return True
    return word(session.find("accelerate.distributed_type")) == "deepspeed" and word(session.find("accelerate.mixed_precision")) in dtypes


def _has_masters(session: Session) -> bool:
    return trains_in(session, "bf16", "fp16")


def _batch_size(key: Key) -> None:
    """Translates the batch sizes: samples of a step = samples of a microbatch x microbatches x ranks."""
    total, micro, rounds = (integer(key.session.find(name)) for name in _SIZES)
    if (integer(key.value) or 0) < 1:
        return key.refused("must be an integer of at least 1")
    plain = "batches are the program's (`tessera train --batch`)"
    if (total or 0) < 1 or (micro or 0) < 1:
        return key.ignored(plain)
    of_a_rank = micro * (1 if rounds is None else rounds)
    if of_a_rank < 1 or total % of_a_rank != 0:
        return key.refused(f"{_SIZES[0]} must be {_SIZES[1]} x {_SIZES[2]} x ranks, and {total} is no multiple of {micro} x {of_a_rank // micro}")
    ranks = total // of_a_rank
    key.ignored(f"{plain}. The sizes agree for {ranks} ranks" if rounds else
                f"{plain}. gradient_accumulation is 1, which is right for {ranks} ranks; for N ranks set it to {ranks} / N")


# ---------------------------------------------------------------------------------------------------- zero_optimization


def _stage(key: Key) -> None:
    stage = integer(key.value)
    if stage not in range(4):
        return key.refused("must be 0, 1, 2 or 3")
    name = _name_at_stage_3(key.session) if stage == 3 else _STAGES[stage]
    key.put("/strategy", name, "mics_shard_size makes it hybrid" if name == "HYBRID_SHARD" else "")


def _name_at_stage_3(session: Session) -> str:
    return "HYBRID_SHARD" if (integer(session.find(_ZERO + "mics_shard_size")) or 0) > 0 else "FULL_SHARD"


def _mics_shard_size(key: Key) -> None:
    size = integer(key.value)
    if size is not None and size <= 0:
        key.ignored("off")
    elif integer(key.session.find(_ZERO + "stage")) != 3:
        key.refused("MiCS needs stage 3, which becomes HYBRID_SHARD")
    else:
        key.put_number("/mesh/shard")


def _old_form(key: Key) -> None:
    """Translates the old form of "zero_optimization": true means stage 1."""
    on = boolean(key.value)
    key.refused("must be an object with keys of its own") if on is None else key.put("/strategy", _STAGES[on])


def _prefetch_size(key: Key) -> None:
    elements = integer(key.value)
    if elements == 0:
        key.put("/prefetch", 0)
    elif elements is None:
        key.ignored("prefetch says how many units are gathered ahead, and is 1; or prefetch_bytes does")
    else:
        key.put("/prefetch_bytes", min(elements, 1 << 60) * (2 if _has_masters(key.session) else 4))


def _secondary_shards(key: Key) -> None:
    session, size = key.session, integer(key.value)
    offloaded = word(session.find(_PARAMETERS + "device"))
    if size is not None and size <= 1:
        key.ignored("off")
    elif size is None:
        key.refused("must be a number of ranks")
    elif integer(session.find(_ZERO + "stage")) != 3:
        key.ignored("DeepSpeed reads it at stage 3 alone")
    elif offloaded == "nvme" or offloaded == "cpu" and session.device != "cpu":
        key.refused("a second copy needs more memory than offload_param saves. Leave one of them out")
    else:
        put_second_copy(key, size, _name_at_stage_3(session))


_WEIGHTS_TRAVEL = ("parameters travel in the type of mixed_precision.param. Use bf16, which is 2 bytes; or compression.gathers, whose "
                   "codes are others than DeepSpeed's")
_GRADIENTS_TRAVEL = ("gradients travel in the type of mixed_precision.reduce. Use bf16; or compression.gradients, whose codes are others than "
                     "DeepSpeed's")
_WHOLE = "a unit is gathered as a whole: units.classes, units.modules or units.min_numel say which modules are units"
_EXPORT = "weights are gathered when the program asks: save_weights, export_safetensors or `tessera checkpoint export`"


def _of_stage_3(prefix: str) -> list[Row]:
    return below(
        prefix,
        rule("prefetch_bucket_size", '0: `prefetch` 0; a number of elements: `prefetch_bytes`, what they take; "auto": ignored', _prefetch_size),
        ignores("param_persistence_threshold model_persistence_threshold",
                "small parameters belong to a unit as others do, and cost no call of their own"),
        ignores("max_live_parameters", "Tessera gathers units: prefetch + 1 of them, and the root, are in memory at a time"),
        ignores("max_reuse_distance", "Tessera records the order of units, and keeps those that are needed first"),
        ignores("gather_16bit_weights_on_model_save", _EXPORT),
        ignores("module_granularity_threshold", _WHOLE),
        ignores("use_all_reduce_for_fetch_params", "a unit is gathered with one all-gather"),
        ignores("allgather_sequential", "units are gathered one by one, in place"))


_ZERO_ROWS = below(
    _ZERO,
    rule("stage", '0, 1, 2, 3: `strategy` "NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "FULL_SHARD"; 3 with `mics_shard_size`: "HYBRID_SHARD"',
         _stage),
    rule("mics_shard_size", 'above 0, with stage 3: `strategy` "HYBRID_SHARD" and `mesh.shard`', _mics_shard_size),
    ignores("mics_hierarchical_params_gather", "Tessera chooses how groups that span hosts gather"),
    rule("zero_hpz_partition_size", '1: ignored; above, with stage 3: `secondary.form` "plain" and `secondary.ranks`; refused beside an offload_param',
         _secondary_shards),
    expects("zero_quantized_weights", False, "off", _WEIGHTS_TRAVEL),
    expects("zero_quantized_gradients", False, "off", _GRADIENTS_TRAVEL),
    expects("zero_quantized_nontrainable_weights", False, "off", "frozen parameters have the type that mixed_precision.param says"),
    refuses("zeropp_loco_param.*", _GRADIENTS_TRAVEL),
    refuses("zenflow.*", 'ZenFlow updates with gradients of earlier steps, which changes training. offload with tier "nvme" moves states beside the '
            "computation, and optimizer.in_backward updates during backward"),
    ignores("contiguous_gradients", "Tessera's gradients lie in flat buffers always"),
    ignores("reduce_scatter", "the strategy says which collective reduces gradients"),
    ignores("reduce_bucket_size", "a unit's gradients are one bucket; with NO_SHARD units.bucket_cap_mb makes others"),
    ignores("allgather_bucket_size", "a unit is gathered with one call"),
    ignores("allgather_partitions", "Tessera gathers with all-gather always"),
    ignores("use_multi_rank_bucket_allreduce", "a unit's gradients are reduced with one call"),
    ignores("overlap_comm", "Tessera reduces and gathers beside the computation always; reductions_ahead and prefetch say how far"),
    ignores("round_robin_gradients", "a unit's gradients are reduced as soon as they are there"),
    ignores("ignore_unused_parameters", "parameters that no rank used take part with zeros, and are not waited for in later steps"),
    ignores("legacy_stage1", "there is one implementation"),
    ignores("elastic_checkpoint", "checkpoints load on any number of ranks"),
    ignores("load_from_fp32_weights", "checkpoints have fp32 master weights"),
    _of_stage_3(""),
    _of_stage_3("stage3_"),
    ignores("stage3_gather_fp16_weights_on_model_save", _EXPORT),
    ignores("sub_group_size", "the update goes through memory in one pass; offload.record says how much is moved to and from disks at once"),
    ignores("memory_efficient_linear", "Tessera keeps no copies of gathered parameters for backward"),
    ignores("override_module_apply", "modules stay as they are"),
    ignores("log_trace_cache_warnings", "it changes what is logged"),
    ignores("enable_sanity_checks", 'checks are the strategy\'s "check"'),
    ignores("pipeline_loading_checkpoint", "it changes how a checkpoint is read"),
    ignores("leaf_module.*", _WHOLE),
    ignores("save_muon_momentum_buffer_in_memory", "offload.moments says where Tessera keeps it"))


def finish_zero(session: Session) -> None:
    if session.find(_ZERO + "stage") is None:
        session.imply("/strategy", "NO_SHARD", "DeepSpeed's default is stage 0")
    if session.settings.get("/strategy") in ("FULL_SHARD", "HYBRID_SHARD") and "/units/classes" not in session.settings:
        session.notes.append(UNITS_NOTE)


# -------------------------------------------------------------------------------------------------------------- offload


def _put_states(key: Key, tier: str) -> None:
    key.put("/offload/moments/tier", tier, also="/offload/masters/tier" if _has_masters(key.session) else "")


def _put_parameters(key: Key, tier: str) -> None:
    if integer(key.session.find(_ZERO + "stage")) != 3:
        return key.refused("parameters are offloaded with stage 3 only, in DeepSpeed and in Tessera")
    key.put("/offload/parameters/tier", tier)


def _has_nvme_path(session: Session, section: str) -> bool:
    return word(session.find(section + "nvme_path")) not in ("", "none")


def _nvme_path(section: str) -> Rule:
    def apply(key: Key) -> None:
        if word(key.session.find(section + "device")) != "nvme":
            return key.ignored("the device is not nvme")
        if not _has_nvme_path(key.session, section):
            return key.refused("must be the path of a directory on a local disk")
        paths = list(dict.fromkeys([*key.session.settings.get("/offload/paths", []), key.value]))
        key.put("/offload/paths", paths, "Difference: parameters and states are spread over all paths" if len(paths) > 1 else "")
    return apply


def _device(section: str, put: Callable[[Key, str], None]) -> Rule:
    def apply(key: Key) -> None:
        device = word(key.value)
        if device == "none":
            key.ignored("not offloaded")
        elif device == "cpu":
            to_host(key, lambda key: put(key, "host"))
        elif device != "nvme":
            key.refused("must be none, cpu or nvme")
        elif not _has_nvme_path(key.session, section):
            key.refused("nvme_path is missing: it becomes offload.paths")
        else:
            put(key, "nvme")
    return apply


def _offload_section(section: str, doc: str, put: Callable[[Key, str], None], old_names: str) -> list[Row]:
    def apply_old(key: Key) -> None:
        key.ignored("not offloaded") if boolean(key.value) is False else to_host(key, lambda key: put(key, "host"))
    return [
        *below(section,
               rule("device", f'nvme: {doc} "nvme"; cpu: the same with "host" {OF_THE_DEVICE}', _device(section, put)),
               rule("nvme_path", "`offload.paths`, while the device is nvme", _nvme_path(section)),
               ignores("pin_memory", "what moves to and from disks, or lies in the memory of a GPU's host, is pinned as it must be"),
               ignores("buffer_count", "offload.queue_depth says how many records are read ahead and written behind"),
               ignores("buffer_size", "offload.record says how much a record holds; the plan sizes all buffers")),
        *(row for name in old_names.split() for row in rule(_ZERO + name, "true: as device cpu (the form of old files)", apply_old))]


def _states_ratio(key: Key) -> None:
    device = word(key.session.find(_STATES + "device"))
    if device != "nvme" and (device, key.session.device) != ("cpu", "gpu"):
        return key.ignored("follows device, which moves nothing from where it is")
    key.put_number("/offload/moments/fraction", also="/offload/masters/fraction" if _has_masters(key.session) else "")


_OFFLOAD = [
    *_offload_section(_STATES, "`offload.moments.tier`, and with bf16 or fp16 `offload.masters.tier` too,", _put_states, "cpu_offload"),
    *below(_STATES,
           rule("ratio", "`offload.moments.fraction` and `offload.masters.fraction`, while they are offloaded", _states_ratio),
           ignores("pipeline_read", "records are read ahead always; offload.queue_depth says how far"),
           ignores("pipeline_write", "records are written behind always; offload.queue_depth says how far"),
           ignores("pipeline", "records are read ahead and written behind always"),
           ignores("fast_init", "it changes how states are set up"),
           ignores("super_offload", 'it changes how the host updates states; offload.step "auto" measures whether CPU or GPU does it faster'),
           ignores("cpuadam_cores_perc", "ranks share the cores of a host evenly; OMP_NUM_THREADS says otherwise")),
    *_offload_section(_PARAMETERS, "with stage 3 `offload.parameters.tier`", _put_parameters, "cpu_offload_params cpu_offload_param"),
    *ignores(_PARAMETERS + "max_in_cpu", "offload.cache says how many bytes of records stay in memory"),
    *ignores(_ZERO + "cpu_offload_use_pin_memory", "what lies in the memory of a GPU's host is pinned always"),
]

# ---------------------------------------------------------------------------------------------------------------- types


def _has_fixed_scale(session: Session) -> bool:
    return (number(session.find("fp16.loss_scale")) or 0) > 0


def _counts_overflows(session: Session) -> bool:
    """Returns whether DeepSpeed lowers the scale only after a number of overflows. It does so if ZeRO is on; otherwise
    it lowers the scale at every overflow."""
    stage = session.find(_ZERO + "stage")
    if stage is None and session.find("accelerate.distributed_type") is not None:
        return True  # in Accelerate, the default is stage 2
    return session.is_on("zero_optimization") or (number(stage) or 0) > 0


def _with_fp16(key: Key, apply: Rule) -> None:
    apply(key) if trains_in(key.session, "fp16") else key.ignored("fp16 is not enabled, so the loss is not scaled")


def _with_moving_scale(key: Key, apply: Rule) -> None:
    """Applies the rule of a key that DeepSpeed reads only if the loss scale is dynamic. Otherwise the key is
    ignored."""
    _with_fp16(key, lambda key: key.ignored("fp16.loss_scale gives a fixed scale") if _has_fixed_scale(key.session) else apply(key))


def _enables(section: str, dtype: str) -> list[Row]:
    def apply(key: Key) -> None:
        on = boolean(key.value)
        if on is None:
            key.refused("must be true or false")
        elif not on:
            key.ignored("off")
        elif trains_in(key.session, "fp16") and trains_in(key.session, "bf16"):
            key.refused("fp16 and bf16 are both enabled. Enable one of them")
        else:
            key.put("/mixed_precision/param", dtype)
    return rule(f"{section}.enabled", f'true: `mixed_precision.param` "{dtype}", and `mixed_precision.reduce` "{dtype}" unless '
                "`communication_data_type` says another type", apply)


def _loss_scale(key: Key) -> None:
    if number(key.value) == 0:
        return key.put(_SCALE + "dynamic", True)
    key.put_number(_SCALE + "initial", "mixed_precision.loss_scale.dynamic = false")
    if _SCALE + "initial" in key.session.settings:
        key.session.settings[_SCALE + "dynamic"] = False


def _initial_power(key: Key) -> None:
    power = number(key.value)
    if power is None or not 0 <= power <= 32:
        return key.refused("must be from 0 to 32: Tessera's scale is at most 2^32")
    key.put(_SCALE + "initial", 2.0**power)


def _hysteresis(key: Key) -> None:
    if not _counts_overflows(key.session):
        return key.ignored("DeepSpeed reads it with stages 1 to 3; without ZeRO its scale falls at every overflow")
    same = number(key.value) == 1 or key.session.is_on("fp16.consecutive_hysteresis")
    key.put_number(_SCALE + "hysteresis", "" if same else "Difference: Tessera counts overflows in a row, and DeepSpeed also those with finite steps "
                   "between them, unless consecutive_hysteresis is true")


def _consecutive(key: Key) -> None:
    key.ignored("Tessera counts overflows in a row" + (" too" if boolean(key.value) else ": fp16.hysteresis says what differs"))


def _communication_type(key: Key) -> None:
    dtype = word(key.value)
    if dtype == "fp16" and not trains_in(key.session, "fp16"):
        return key.refused('mixed_precision.reduce "fp16" needs fp16 parameters, since only then the loss is scaled. Use "bf16" or "fp32"')
    key.put("/mixed_precision/reduce", dtype or key.value)


def _bf16(section: str) -> list[Row]:
    # Older versions of DeepSpeed do not read the keys of the last row, but many files have these keys.
    return [*_enables(section, "bf16"), *below(
        f"{section}.",
        ignores("immediate_grad_update", "Tessera reduces each unit's gradients as soon as they are there"),
        ignores("check_grad_overflow", "Tessera skips a step whose gradients are not finite, always"),
        expects("bf16_master_weights_and_grads", False, "master weights are fp32",
                "Tessera's master weights are fp32 always, and take 2 bytes beside a bf16 parameter. optimizer.state_dtype \"bf16\" or \"8bit\" "
                "saves memory"),
        expects("bf16_optimizer_states", False, "optimizer states are fp32",
                'set optimizer.state_dtype "bf16" instead: Tessera rounds such states stochastically, DeepSpeed to nearest'),
        ignores("auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale", "bf16 needs no loss scaling"))]


_ONLY = " while fp16 is enabled, and no fixed scale is given"
_TYPES = [
    *_enables("fp16", "fp16"),
    *ignores("fp16.auto_cast", "the program gives forward inputs of the type that it wants"),
    *guarded(_with_fp16, rule("fp16.loss_scale", "0: `mixed_precision.loss_scale.dynamic` true; above 0: `dynamic` false and `initial`, while fp16 "
                              "is enabled", _loss_scale)),
    *guarded(_with_moving_scale, below(
        "fp16.",
        rule("initial_scale_power", "n: `mixed_precision.loss_scale.initial` 2^n" + _ONLY, _initial_power),
        rule("loss_scale_window", "`mixed_precision.loss_scale.growth_interval`" + _ONLY, lambda key: key.put_number(_SCALE + "growth_interval")),
        rule("hysteresis", f"`mixed_precision.loss_scale.hysteresis`{_ONLY}; with the difference that Tessera counts overflows in a row",
             _hysteresis),
        rule("consecutive_hysteresis", "ignored: true is what Tessera does; false differs as `fp16.hysteresis` says", _consecutive),
        rule("min_loss_scale", "`mixed_precision.loss_scale.minimum`" + _ONLY, lambda key: key.put_number(
            _SCALE + "minimum", "Difference: at the minimum Tessera skips the step, and DeepSpeed with ZeRO ends the run")))),
    *expects("fp16.fp16_master_weights_and_grads", False, "master weights are fp32",
             'Tessera\'s master weights are fp32 always. optimizer.state_dtype "bf16" or "8bit" saves as much memory'),
    *_bf16("bf16"),
    *_bf16("bfloat16"),
    *rule("communication_data_type", "`mixed_precision.reduce`; fp16 is refused unless fp16 is enabled", _communication_type),
    *ignores("seq_parallel_communication_data_type", "there is no sequence parallelism"),
    *expects("data_types.grad_accum_dtype", "fp32", "Tessera adds up gradients in fp32 always",
             "Tessera adds up gradients in fp32 always, in shards. Leave the key out, or set it to fp32"),
    *refuses("data_types.param_dtype", "bf16.enabled or fp16.enabled says the type of parameters"),
    *refuses("data_types.buffer_dtype", "buffers keep the type that the program gives them"),
    *switched_off("amp", "Apex's AMP is not there. Use fp16.enabled or bf16.enabled, which give mixed_precision.param"),
    *switched_off("torch_autocast", "autocast is the program's: it calls forward under torch.autocast or at::autocast. Parameters in 16 bits are "
                  "mixed_precision.param"),
]


def finish_types(session: Session) -> None:
    param = session.settings.get("/mixed_precision/param")
    if param in ("fp16", "bf16") and not session.is_auto("communication_data_type"):
        session.imply("/mixed_precision/reduce", param,
                      "DeepSpeed sends gradients in the type of the parameters, unless communication_data_type says another")
    if param != "fp16" or _has_fixed_scale(session):
        return
    if not session.is_auto("fp16.loss_scale_window"):
        session.imply(_SCALE + "growth_interval", 1000, "DeepSpeed's default")
    if _counts_overflows(session) and not session.is_auto("fp16.hysteresis"):
        session.imply(_SCALE + "hysteresis", 2, "DeepSpeed's default. Difference: Tessera counts overflows in a row, and DeepSpeed also those with "
                      "finite steps between them")


# ------------------------------------------------------------------------------------------------------------- the rest


def activations_to_host(key: Key) -> None:
    if boolean(key.value) is False:
        return key.ignored("off")
    to_host(key, lambda key: key.put("/offload/activations/tier", "host", "Difference: all that forward keeps for backward goes there, from "
                                     "offload.activations.min bytes on"))


_PRINTED, _LOGGED = "what is printed does not change training", "what is logged does not change training"
_RECOMPUTE = "recomputation is the program's: it calls tessera::checkpoint (tessera/recompute.h)"
_ASYNC = 'set "checkpoint": {"async": true}: a save copies the state, and a thread writes it'
_PARALLEL = "Tessera shards data-parallel training, and has no tensor, pipeline, sequence or expert parallelism"
_ROWS = [
    *rule(_SIZES[0], "ignored: batches are the program's. Refused where the three sizes contradict each other", _batch_size),
    *rule(_SIZES[1], "ignored: batches are the program's. Refused where the three sizes contradict each other", _batch_size),
    *sets(_SIZES[2], "/gradient_accumulation"),
    *expects("managed_gradient_accumulation", True, "Tessera counts microbatches too",
             "Tessera counts microbatches itself: set gradient_accumulation, and call Engine::step when step_is_due()"),
    *ignores("dataloader_drop_last", "data is the program's; `tessera train --tail` says what becomes of an epoch's last step"),
    *sets("gradient_clipping", "/gradient_clipping"),
    *ignores("prescale_gradients gradient_predivide_factor",
             "gradients are summed in fp32 and divided once, in the update, so there is no overflow to prevent"),
    *expects("gradient_allreduce_op", "mean", "Tessera takes the mean too",
             "Tessera takes the mean over the ranks. Multiply the loss by the number of ranks for the sum"),
    *expects("sparse_gradients", False, "off",
             "Tessera's gradients are dense. Make embeddings with sparse false: the gradients are the same numbers"),
    *ignores("disable_allgather", "DeepSpeed does not read it any more"),
    *rule("zero_optimization", 'true: `strategy` "SHARD_OPTIMIZER"; false: "NO_SHARD" (the form of old files)', _old_form),
    *_ZERO_ROWS, *_OFFLOAD, *_TYPES, *OPTIMIZER, *SCHEDULER,
    *ignores("steps_per_print", f"{_PRINTED}. Use `tessera train --log-every N`"),
    *ignores("wall_clock_breakdown", f"{_PRINTED}. Use `tessera train --trace`"),
    *ignores("memory_breakdown", f"{_PRINTED}. `tessera plan` says what memory is for"),
    *ignores("dump_state", f"{_PRINTED}. `tessera train --out` writes the resolved strategy"),
    *ignores("log_level", _PRINTED),
    *ignores("tensorboard.*", f"{_LOGGED}. Use `tessera train --tensorboard FOLDER`, or MetricsFile::in_tensorboard"),
    *ignores("csv_monitor.*", f"{_LOGGED}. Use `tessera train --metrics NAME.csv`"),
    *ignores("wandb.* comet.*", f"{_LOGGED}. Use `tessera train --metrics FILE`, JSON lines that a script can send there"),
    *ignores("comms_logger.*", f"{_LOGGED}. Use `tessera train --trace`; `tessera plan` counts calls and bytes"),
    *ignores("flops_profiler.* timers.*", f"{_LOGGED}. Use `tessera train --trace`"),
    *below("activation_checkpointing.",
           ignores("partition_activations", f"{_RECOMPUTE}, and there is no tensor parallelism to partition over"),
           ignores("contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile", _RECOMPUTE),
           rule("cpu_checkpointing", ACTIVATIONS_DOC, activations_to_host)),
    *ignores("checkpoint.tag_validation", "ranks agree on a checkpoint's name always"),
    *ignores("checkpoint.load_universal", "checkpoints load on any number of ranks always"),
    *expects("checkpoint.use_node_local_storage", False, "off", "a checkpoint is one folder that all ranks see. Save to storage that hosts share"),
    *ignores("checkpoint.parallel_write.pipeline_stage", "all ranks write side by side always"),
    *switched_off("nebula", _ASYNC),
    *refuses("datastates_ckpt.*", _ASYNC),
    *ignores("aio.*", "it tunes DeepSpeed's reader. offload.record and offload.queue_depth tune Tessera's"),
    *switched_off("elasticity", "batches stay as the program makes them. A checkpoint goes on with another number of ranks; `tessera launch "
                  "--max-restarts` starts ranks again"),
    *switched_off("autotuning", "`tessera plan` says what a strategy needs, and `tessera bench buckets` measures buckets"),
    *switched_off("curriculum_learning", "data is the program's: give it sequences of the length that it wants"),
    *switched_off("data_efficiency", "data is the program's"),
    *switched_off("progressive_layer_drop", "which layers run is the model's"),
    *switched_off("eigenvalue", "it belongs to quantized training, which Tessera has not"),
    *refuses("quantize_training.* compression_training.* weight_quantization.*", "Tessera does not prune or quantize weights in training"),
    *refuses("sparse_attention.*", "attention is the model's"),
    *switched_off("hybrid_engine", "Tessera does not generate text while it trains. Evaluate with Engine::evaluate, or sample from exported weights"),
    *refuses("compile.*", "Tessera runs the module as it is, without torch.compile"),
    *expects("graph_harvesting", False, "off", "Tessera runs without CUDA graphs"),
    *refuses("pipeline.* tensor_parallel.*", _PARALLEL),
    *switched_off("expert_parallel", _PARALLEL),
    *expects("sequence_parallel_size data_parallel_size", 1.0, "off", _PARALLEL),
    *expects("use_data_before_expert_parallelism", False, "off", _PARALLEL),
    *ignores("zero_allow_untested_optimizer", "Tessera's optimizers train under every strategy"),
    *ignores("zero_force_ds_cpu_optimizer", "Tessera has one optimizer for each rule"),
    *ignores("$schema", "it is for editors"),
]


def finish_clipping(session: Session) -> None:
    if session.find("gradient_clipping") is None:
        session.notes.append("The file says no gradient_clipping. DeepSpeed clips at 1.0 then since June 2026, and did not before; this strategy "
                             'does not. Set "gradient_clipping" to what you want.')


def _finish(session: Session) -> None:
    for part in (finish_zero, finish_types, finish_scheduler, finish_optimizer, finish_clipping):
        part(session)


FORMAT = Format("deepspeed", "a DeepSpeed configuration", "DeepSpeed (`--format deepspeed`)", _ROWS, lambda path: path, _finish)
