"""Combines TrainingArguments of `transformers` with a strategy. If both give a value, the two values must be equal."""

import dataclasses
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tessera._engine import Strategy
from tessera._error import Error
from tessera.integrations._bridge import agree, copy_of, name_units, use_manual_schedule

_SHARDED_ALREADY = "[T0700] hint: leave it out, since the strategy says how the model is sharded"
_STRATEGY_HAS_TYPES = "[T0701] hint: leave it out, since evaluation computes in the type that the strategy names"
_NO_DDP = "[T0702] hint: leave it out, since TesseraTrainer does not use DistributedDataParallel"
_REFUSED = {
    "fsdp": _SHARDED_ALREADY,
    "deepspeed": _SHARDED_ALREADY,
    "parallelism_config": _SHARDED_ALREADY,
    "fp16": '[T0703] hint: leave it out, and set "mixed_precision": {"param": "fp16"} in the strategy',
    "fp16_full_eval": _STRATEGY_HAS_TYPES,
    "bf16_full_eval": _STRATEGY_HAS_TYPES,
    "torch_compile": "[T0704] hint: leave it out, and call compile() on the model's blocks before the trainer is made",
    "use_liger_kernel": "[T0705] hint: leave it out, since its kernels read parameters without an operator that Tessera could see",
    "auto_find_batch_size": "[T0706] hint: choose per_device_train_batch_size; tessera.plan tells how much memory a strategy needs",
    "save_on_each_node": "[T0707] hint: leave it out, since a checkpoint is one folder that all hosts must reach",
    "enable_jit_checkpoint": "[T0708] hint: leave it out, since a signal does not reach all ranks at the same step",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": '[T0709] hint: leave it out, and set "broadcast_buffers": "from_rank_zero" in the strategy',
    "ddp_static_graph": _NO_DDP,
}
_OF_AN_OPTIMIZER = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")


def expect_possible(args: TrainingArguments, trainer: dict[str, Any]) -> None:
    """Raises Error if an argument of TrainingArguments or of Trainer would have no effect, or a wrong effect."""
    for name in ("model_init", "optimizers", "optimizer_cls_and_kwargs"):
        if trainer.get(name) not in (None, (None, None)):
            raise Error(f"TesseraTrainer does not take {name}: the Engine has one model, and updates it itself. "
                        '[T0710] hint: pass model=, and name the update rule in the strategy, in "optimizer"')
    for name, hint in _REFUSED.items():
        if getattr(args, name, None):
            raise Error(f"TesseraTrainer does not take TrainingArguments.{name}={getattr(args, name)!r}. {hint}")


def completed(strategy: Strategy, args: TrainingArguments, model: torch.nn.Module, trainer: Trainer) -> dict[str, Any]:
    """Returns the strategy, completed with the values that only the arguments give."""
    strategy = copy_of(strategy)
    microbatches = args.gradient_accumulation_steps
    agree(strategy, "gradient_accumulation", microbatches, "TrainingArguments.gradient_accumulation_steps")
    agree(strategy, "gradient_clipping", args.max_grad_norm, "TrainingArguments.max_grad_norm")
    use_manual_schedule(strategy, f"the Trainer, by lr_scheduler_type {args.lr_scheduler_type.value},")
    if args.bf16 and strategy.get("mixed_precision", {}).get("param") == "fp16":
        raise Error('TrainingArguments.bf16 disagrees with "mixed_precision": {"param": "fp16"} in the strategy. '
                    "[T0711] hint: leave one of them out")
    name_units(strategy, model)
    optimizer = strategy.setdefault("optimizer", {})
    agree(optimizer, "lr", args.learning_rate, "TrainingArguments.learning_rate")
    if "type" in optimizer:
        _expect_defaults(args)
    else:
        _add_adamw(optimizer, args, model, trainer)
    for index, group in enumerate(optimizer.get("groups", ())):
        group["name"] = group.get("name") or f"group {index}"  # schedulers and callbacks reach the group by this name
    return strategy


def _expect_defaults(args: TrainingArguments) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name in _OF_AN_OPTIMIZER:
        if getattr(args, name) != defaults[name]:
            raise Error(f"TrainingArguments.{name}={getattr(args, name)!r} has no effect, since the strategy names the "
                        'optimizer\'s type. [T0712] hint: set it in the strategy, in "optimizer"')


def _add_adamw(optimizer: dict, args: TrainingArguments, model: torch.nn.Module, trainer: Trainer) -> None:
    """Adds AdamW as the Trainer makes it, with no weight decay for biases and the weights of normalization layers."""
    if args.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise Error(f'TesseraTrainer does not take TrainingArguments.optim="{args.optim.value}". [T0713] hint: leave it out, '
                    'and name the update rule in the strategy: "optimizer": {"type": ...}')
    optimizer["type"] = "adamw"
    agree(optimizer, "betas", [args.adam_beta1, args.adam_beta2], "TrainingArguments.adam_beta1 and adam_beta2")
    agree(optimizer, "eps", args.adam_epsilon, "TrainingArguments.adam_epsilon")
    agree(optimizer, "weight_decay", args.weight_decay, "TrainingArguments.weight_decay")
    decaying = set(trainer.get_decay_parameter_names(model))
    others = [name for name, value in model.named_parameters() if value.requires_grad and name not in decaying]
    if args.weight_decay and others:
        optimizer.setdefault("groups", [{"match": others, "weight_decay": 0.0}])
