"""Defines the rows of FSDP's keys.

Accelerate's files have them as "fsdp_sharding_strategy" in "fsdp_config". transformers has them as "sharding_strategy"
or "fsdp_sharding_strategy", alone or in "fsdp_config". Rows call both "fsdp.sharding_strategy".
"""

from tessera.import_config._deepspeed import ACTIVATIONS_DOC, UNITS_NOTE, activations_to_host
from tessera.import_config._rows import OF_THE_DEVICE, Format, Row, below, expects, ignores, put_second_copy, refuses, rule, to_host
from tessera.import_config._session import Key, Session, setting_text
from tessera.import_config._values import boolean, integer, names, quoted, word

PROGRAM_NOTE = ("Optimizer, learning rate, clipping and schedule are the training program's. Say them in the strategy's \"optimizer\", "
                '"gradient_clipping" and "lr_schedule"; TesseraTrainer takes them from TrainingArguments.')
_SHARDINGS = ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
_TYPES = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
_PREFETCHES = ["backward_pre", "backward_post", "no_prefetch"]
_OTHER_NAMES = {"backward_prefetch_policy": "backward_prefetch", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}


def row_name(path: str) -> str:
    name = path.removeprefix("fsdp_config.").removeprefix("fsdp_")
    return "fsdp." + _OTHER_NAMES.get(name, name)


def _name_of(key: Key, known: list[str]) -> str:
    """Returns the name for a value that is given as a name, an enumerator or a number from 1 on. Returns "" if the
    value is unknown."""
    number = integer(key.value)
    if number is not None:
        return known[number - 1] if 1 <= number <= len(known) else ""
    name = word(key.value).rpartition(".")[2].removeprefix("_")
    return name if name in known else ""


def _is_replicated(session: Session) -> bool:
    return (integer(session.find("accelerate.parallelism_config.parallelism_config_dp_replicate_size")) or 1) > 1


def _put_sharding(key: Key, name: str) -> None:
    if name == "hybrid_shard_zero2":
        key.refused('use "strategy": "SHARD_GRAD_OP" with "mesh": {"replicate": HOSTS}, which is the same; or HYBRID_SHARD, which needs less memory '
                    "and gathers once more")
    elif not name:
        key.refused("must be FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD, or a number from 1 to 4")
    elif name == "full_shard" and _is_replicated(key.session):
        key.put("/strategy", "HYBRID_SHARD", "parallelism_config makes it hybrid")
    else:
        key.put("/strategy", name.upper())


def _reads_reshard(session: Session) -> bool:
    """Returns whether FSDP reads the key for resharding. Version 2 reads only reshard_after_forward."""
    reshard, version = session.find("fsdp.reshard_after_forward"), session.find("fsdp.version")
    if reshard is None or session.find("fsdp.sharding_strategy") is None:
        return reshard is not None
    return integer(version) == 2 if version is not None else boolean(reshard) is not None


def _sharding_strategy(key: Key) -> None:
    if _reads_reshard(key.session):
        return key.ignored("FSDP 2 reads reshard_after_forward in its place")
    _put_sharding(key, _name_of(key, _SHARDINGS))


def _reshard_after_forward(key: Key) -> None:
    reshard = boolean(key.value)
    if not _reads_reshard(key.session):
        return key.ignored("FSDP 1 reads sharding_strategy in its place")
    ranks = integer(key.value)
    if ranks is not None and ranks > 1 and integer(key.session.find("fsdp.version")) == 2:
        return put_second_copy(key, ranks, "HYBRID_SHARD" if _is_replicated(key.session) else "FULL_SHARD")
    _put_sharding(key, _name_of(key, _SHARDINGS) if reshard is None else "full_shard" if reshard else "shard_grad_op")


def _options(key: Key) -> None:
    """Translates the words of TrainingArguments' "fsdp": "full_shard auto_wrap"."""
    if isinstance(key.value, bool):
        return key.ignored("fsdp_config says what FSDP does")
    words = [each for name in names(key.value) or [] for each in name.split()]
    unknown = [each for each in words if each not in (*_SHARDINGS, "auto_wrap", "offload")]
    sharding = next((each for each in reversed(words) if each in _SHARDINGS), "")
    if key.session.find("fsdp.sharding_strategy") is not None or key.session.find("fsdp.reshard_after_forward") is not None:
        sharding = ""
    if unknown:
        key.refused(f"the word {quoted(unknown[0], 60)} is unknown")
    elif "offload" in words:
        to_host(key, lambda key: _put_offload(key, sharding))
    elif sharding:
        _put_sharding(key, sharding)
    else:
        key.ignored("the other keys say what FSDP does")


def _put_offload(key: Key, sharding: str = "") -> None:
    if sharding == "hybrid_shard_zero2":
        return _put_sharding(key, sharding)
    key.put("/offload/moments/tier", "host", sharding and setting_text("/strategy", sharding.upper()))
    if sharding:
        key.session.settings["/strategy"] = sharding.upper()


def _offload(key: Key) -> None:
    key.ignored("not offloaded") if boolean(key.value) is False else to_host(key, _put_offload)


def _finish_offload(session: Session) -> None:
    """Sets the other effects of FSDP's CPU offload, which depend on several keys."""
    if session.settings.get("/offload/moments/tier") != "host":
        return
    has_masters = session.settings.get("/mixed_precision/param", "fp32") != "fp32"
    releases = session.settings.get("/strategy", "FULL_SHARD") in ("FULL_SHARD", "HYBRID_SHARD")
    why = "FSDP's CPU offload keeps a rank's part of all in the host's memory"
    if releases and "/secondary/form" not in session.settings:  # a second copy needs parameters in memory
        session.imply("/offload/parameters/tier", "host", why)
    if has_masters:
        session.imply("/offload/masters/tier", "host", why)
    session.imply("/offload/gradients/tier", "host", why)
    if has_masters or releases:
        session.imply("/offload/step", "cpu", "FSDP updates it there")


def _version(key: Key) -> None:
    if integer(key.value) not in (1, 2):
        return key.refused("must be 1 or 2")
    key.ignored("Tessera has one implementation; the version says how FSDP reads the other keys")


def _least_parameters(session: Session) -> int:
    return integer(session.find("fsdp.min_num_params")) or 0


def _wrap_policy(session: Session) -> str:
    """Returns the file's policy. If the file names none, returns the policy that follows from the other keys."""
    policy = session.find("fsdp.auto_wrap_policy")
    if policy is not None:
        return word(policy)
    if names(session.find("fsdp.transformer_layer_cls_to_wrap")):
        return "transformer_based_wrap"
    return "size_based_wrap" if _least_parameters(session) > 0 else "no_wrap"


def _auto_wrap_policy(key: Key) -> None:
    policy = _wrap_policy(key.session)
    if policy == "transformer_based_wrap" and names(key.session.find("fsdp.transformer_layer_cls_to_wrap")):
        key.mapped("units.classes")
    elif policy == "transformer_based_wrap":
        key.ignored("the file names no class, so the training program asks the model. TesseraTrainer does so too; elsewhere set units.classes")
    elif policy == "size_based_wrap" and _least_parameters(key.session) > 0:
        key.mapped("units.min_numel")
    elif policy in ("size_based_wrap", "no_wrap"):
        key.ignored("no units: the whole model is one, as in FSDP")
    else:
        key.refused("must be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")


def _classes_to_wrap(key: Key) -> None:
    classes = names(key.value)
    if classes is None:
        key.refused("must be a list of names, or names with commas between them")
    elif not classes or _wrap_policy(key.session) != "transformer_based_wrap":
        key.ignored("it counts with TRANSFORMER_BASED_WRAP only")
    else:
        key.put("/units/classes", classes)


def _min_num_params(key: Key) -> None:
    if integer(key.value) == 0 or _wrap_policy(key.session) != "size_based_wrap":
        return key.ignored("it counts with SIZE_BASED_WRAP only, and above 0")
    key.put_number("/units/min_numel")


def _backward_prefetch(key: Key) -> None:
    name = _name_of(key, _PREFETCHES)
    if not name:
        key.refused("must be BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")
    elif name == "no_prefetch" and key.session.is_on("fsdp.forward_prefetch"):
        key.ignored("forward_prefetch asks for prefetch 1")
    else:
        key.put("/prefetch", 0 if name == "no_prefetch" else 1, "" if name != "backward_post" else
                "Difference: FSDP then gathers after a unit's gradients are made, and Tessera while they are")


def _forward_prefetch(key: Key) -> None:
    on = boolean(key.value)
    if on is None:
        key.refused("must be true or false")
    elif on:
        key.put("/prefetch", 1)
    else:
        key.ignored("prefetch holds for forward and backward alike, and training is the same")


def _put_type(key: Key, pointer: str) -> None:
    key.put(pointer, _TYPES.get(word(key.value).removeprefix("torch."), key.value))


_OFFLOAD_DOC = ("false: ignored; true: `offload.moments.tier`, `offload.gradients.tier`, with FULL_SHARD `offload.parameters.tier` and with bf16 or "
                f'fp16 `offload.masters.tier` "host", and `offload.step` "cpu", {OF_THE_DEVICE}')
_DEVICES = "Tessera trains on CPUs and NVIDIA GPUs"
ROWS = below(
    "fsdp.",
    rule("version", "ignored: it says how the other keys are read", _version),
    rule("sharding_strategy", "`strategy`: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, or 1 to 4; HYBRID_SHARD_ZERO2 (5) is refused: "
         "SHARD_GRAD_OP with mesh.replicate is the same", _sharding_strategy),
    rule("reshard_after_forward", 'true: `strategy` "FULL_SHARD"; false: "SHARD_GRAD_OP"; a number of ranks in FSDP 2: `secondary.form` "plain" and '
         "`secondary.ranks`; a name: as sharding_strategy", _reshard_after_forward),
    rule("auto_wrap_policy", "TRANSFORMER_BASED_WRAP: `units.classes`; SIZE_BASED_WRAP: `units.min_numel`; NO_WRAP: ignored, as the whole model is "
         "then one unit", _auto_wrap_policy),
    rule("transformer_layer_cls_to_wrap", "`units.classes`; transformer_cls_names_to_wrap is the same", _classes_to_wrap),
    rule("min_num_params", "`units.min_numel`, with SIZE_BASED_WRAP", _min_num_params),
    refuses("ignored_modules", "every parameter of the module is the Engine's. Keep such modules outside of the one that it gets"),
    rule("mixed_precision_policy", "`mixed_precision.param` and `mixed_precision.reduce`", lambda key: _put_type(key, "/mixed_precision/param")),
    rule("mixed_precision_policy.param_dtype", "`mixed_precision.param`; without reduce_dtype in FSDP 1 also `mixed_precision.reduce`, which is fp32 in "
         "FSDP 2", lambda key: _put_type(key, "/mixed_precision/param")),
    rule("mixed_precision_policy.reduce_dtype", "`mixed_precision.reduce`", lambda key: _put_type(key, "/mixed_precision/reduce")),
    ignores("mixed_precision_policy.buffer_dtype", "buffers keep the type that the program gives them"),
    ignores("mixed_precision_policy.output_dtype", "the program gives outputs the type that it wants"),
    ignores("mixed_precision_policy.cast_forward_inputs", "the program gives forward inputs of the type that it wants"),
    rule("backward_prefetch", "BACKWARD_PRE, BACKWARD_POST: `prefetch` 1; NO_PREFETCH: `prefetch` 0; backward_prefetch_policy is the same",
         _backward_prefetch),
    rule("forward_prefetch", "true: `prefetch` 1; false: ignored", _forward_prefetch),
    ignores("limit_all_gathers", "at most prefetch + 1 units are gathered at a time, always"),
    ignores("use_orig_params", "parameters stay those of the module, always"),
    ignores("sync_module_states", "all ranks get rank 0's values, always"),
    ignores("cpu_ram_efficient_loading", "deferred_init makes no rank hold the model, and import_safetensors reads files on rank 0"),
    rule("offload_params", _OFFLOAD_DOC, _offload),
    rule("cpu_offload", _OFFLOAD_DOC, _offload),
    ignores("state_dict_type", "a checkpoint loads under every strategy; export_safetensors writes full weights"),
    ignores("final_state_dict_type", "export_safetensors writes full weights"),
    expects("activation_checkpointing", False, "off", "recomputation is the program's: it calls tessera::checkpoint (tessera/recompute.h), or "
            "gradient_checkpointing_enable() of a model of transformers. Without it activations need more memory"),
    rule("activation_checkpointing_offload", ACTIVATIONS_DOC, activations_to_host),
    ignores("activation_checkpoint_reentrant", "recomputation is the program's"),
    expects("xla xla_fsdp_v2 xla_fsdp_grad_ckpt", False, "off", _DEVICES),
    ignores("xla_fsdp_settings.*", "it counts on TPUs only"))


def _finish_types(session: Session, version: int) -> None:
    """Sets the type of reductions that the file leaves to FSDP of this version."""
    param = session.settings.get("/mixed_precision/param")
    if param is None or "/mixed_precision/reduce" in session.settings:
        return
    if session.find("fsdp.mixed_precision_policy.param_dtype") is None:
        session.imply("/mixed_precision/reduce", param, "one type is said for parameters and gradients")
    elif version == 1:
        session.imply("/mixed_precision/reduce", param, "FSDP 1 reduces in param_dtype unless reduce_dtype says another type")
    elif param != "fp32":
        session.notes.append("Without reduce_dtype, FSDP 2 reduces gradients in the type of the masters, fp32, as this strategy does. Before PyTorch 2.15 it "
                             f'reduced in param_dtype: "mixed_precision": {{"reduce": "{param}"}}.')


def finish_fsdp(session: Session, default_version: int) -> None:
    _finish_types(session, integer(session.find("fsdp.version")) or default_version)
    if _is_replicated(session):
        session.imply("/strategy", "HYBRID_SHARD", "parallelism_config replicates, and FSDP's default is to shard everything")
    _finish_offload(session)
    if session.settings.get("/strategy") != "NO_SHARD" and not session.settings.keys() & {"/units/classes", "/units/min_numel"}:
        session.notes.append(UNITS_NOTE)
    session.notes.append(PROGRAM_NOTE)


def _finish(session: Session) -> None:
    finish_fsdp(session, default_version=2)
    if "/mixed_precision/param" not in session.settings:
        below_too = ', "offload": {"masters": {"tier": "host"}}' if "/offload/moments/tier" in session.settings else ""
        session.notes.append('Types are the training program\'s too: with bf16=True set "mixed_precision": {"param": "bf16", "reduce": "bf16"}'
                             f"{below_too}.")


def _section(key: Key) -> None:
    key.ignored("an empty section: nothing is said") if key.value == {} else key.refused("must be an object with keys of its own")


def _with_titles() -> list[Row]:
    return [row._replace(shown=row.name.removeprefix("fsdp.")) for row in ROWS] + [
        *rule("fsdp", f"the words full_shard, shard_grad_op, no_shard, hybrid_shard: `strategy`, unless fsdp_config says it; auto_wrap: ignored; "
              f"offload: as offload_params, {OF_THE_DEVICE}", _options),
        *rule("fsdp_config", "its keys are those of this table", _section)]


FORMAT = Format("fsdp", "an fsdp_config of transformers",
                "fsdp_config of transformers (`--format fsdp`)\n\nKeys may begin with `fsdp_`, and may stand alone or in an object `fsdp_config` "
                "with `fsdp` beside it. JSON and YAML are read.", _with_titles(), lambda path: path if path in ("fsdp", "fsdp_config") else row_name(path),
                _finish)
