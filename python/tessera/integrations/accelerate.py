"""Provides the Accelerator of Hugging Face's accelerate, with an Engine that trains the model.

    accelerator = Accelerator(gradient_accumulation_steps=4, strategy={"gradient_clipping": 1.0})
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

`tessera launch`, `accelerate launch` or torchrun starts the ranks. The program's loop need not change. The program's
AdamW, Adam or SGD, with its groups and schedulers, determines how parameters are updated, and the Engine updates them.
The Accelerator determines how many microbatches a step has. The strategy, a file or a dict, determines everything else,
including how gradients are clipped. If the strategy and the program both give a value, the two values must be equal.
All ranks call prepare, backward, the optimizer's step, get_state_dict, save_model, save_state and load_state.
"""

import inspect
import math
import os
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, DynamoBackend, is_compiled_module
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from tessera._engine import Engine, Strategy
from tessera._error import Error
from tessera._job import world_size
from tessera.integrations._bridge import (agree, copy_of, expect_device, name_units, take_step,
                                          use_manual_schedule)
from tessera.integrations._optimizer import FollowedOptimizer

_log = get_logger(__name__)
_FOLDER = "tessera"  # the Engine's checkpoint, in the folder of save_state
_SHARDED_ALREADY = "[T0767] hint: leave it out, since the strategy says how the model is sharded"
_COMPILED = "[T0768] hint: leave it out, and call compile() on the model's blocks before prepare"
_REFUSED = {
    "deepspeed_plugin": _SHARDED_ALREADY,
    "deepspeed_plugins": _SHARDED_ALREADY,
    "fsdp_plugin": _SHARDED_ALREADY,
    "megatron_lm_plugin": _SHARDED_ALREADY,
    "torch_tp_plugin": _SHARDED_ALREADY,
    "parallelism_config": _SHARDED_ALREADY,
    "dynamo_backend": _COMPILED,
    "dynamo_plugin": _COMPILED,
}
# Variables that `accelerate launch` sets from its configuration file or its options.
_REFUSED_VARIABLES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM",
                      "ACCELERATE_USE_PARALLELISM_CONFIG")
_KINDS_OF_JOBS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# Maps each sharded model to the Accelerator whose Engine shards it.
_owners: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Accelerator]]" = weakref.WeakKeyDictionary()


class Accelerator(accelerate.Accelerator):
    """An Accelerator that shards its model. The other arguments are those of accelerate's Accelerator.

    `engine` is the Engine, from the first `prepare` with a model on; `result` is the result of the last step. `prepare`
    returns the model itself, sharded. `prepare` takes one model and one optimizer. A model without an optimizer can be
    evaluated, and may get its optimizer in a later call. If there is no GPU, `cpu=True` is the default. If the strategy
    has no "units", they are the blocks that the model names in `_no_split_modules`.
    """

    def __init__(self, *args: Any, strategy: Strategy | None = None, **kwargs: Any) -> None:
        self._given = copy_of({} if strategy is None else strategy)
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        _expect_possible(given)
        if "cpu" not in given and not torch.cuda.is_available():
            kwargs["cpu"] = True  # without this, accelerate's processes on CPUs do not find each other
        self.engine: Engine | None = None
        self.result: Any = None
        self._followed: FollowedOptimizer | None = None
        self._is_preparing = False
        self._forget_window()
        super().__init__(*args, **kwargs)
        self._expect_state()

    def _forget_window(self) -> None:
        self._has_gradients = False  # whether microbatches since the last step or zero_grad gave gradients
        self._has_stepped = False  # whether a step was made since the last zero_grad
        self._norm = torch.full((), math.nan)

    def _expect_state(self) -> None:
        """Checks the decisions that environment variables, and the first Accelerator of the process, have made."""
        if self.distributed_type not in _KINDS_OF_JOBS:
            raise Error(f"accelerate found a job of kind {self.distributed_type.value}, but Tessera trains on CPUs and NVIDIA's "
                        "GPUs. [T0769] hint: pass cpu=True, or use accelerate's own Accelerator there")
        if self.num_processes != world_size():
            raise Error(f"accelerate sees {self.num_processes} processes, but the job has {world_size()} ranks. [T0770] hint: make this "
                        "Accelerator before PartialState and others of accelerate's, or give all of them cpu=True")
        if self.mixed_precision not in ("no", "bf16"):
            raise Error(f'Accelerator does not take mixed_precision="{self.mixed_precision}". [T0771] hint: leave it out, and set '
                        '"mixed_precision": {"param": "fp16"} in the strategy; "bf16", which is autocast, is possible')
        if self.mixed_precision == "bf16" and self._given.get("mixed_precision", {}).get("param") == "fp16":
            raise Error('mixed_precision="bf16" of Accelerator disagrees with "mixed_precision": {"param": "fp16"} in the strategy. '
                        "[T0772] hint: leave one of them out")
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise Error(f"Accelerator does not take ACCELERATE_DYNAMO_BACKEND={self.state.dynamo_plugin.backend.value}. [T0773] hint: leave "
                        "the variable out, and call compile() on the model's blocks before prepare")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares a model, its optimizer, data loaders and schedulers, and returns them in order. It is collective.

        The model itself is returned, sharded. Raises Error (64) for a second model or a second optimizer.
        """
        self._expect_preparable(args)
        known = len(self._models), len(self._optimizers)
        self._is_preparing = True
        try:
            prepared = super().prepare(*args, device_placement=device_placement)
        finally:
            self._is_preparing = False
        if known != (len(self._models), len(self._optimizers)):
            self._make_engine()
        return prepared

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> torch.nn.Module:
        """Prepares one model. With `evaluation_mode`, the model gets autocast and a device, and is not sharded.
        save_state and load_state leave it out.
        """
        if not self._is_preparing and not evaluation_mode:
            return self.prepare(model, device_placement=[device_placement])
        if not self._is_preparing and model not in self._models:
            model = super().prepare_model(model, device_placement, True)
            self._models.remove(model)
            return model
        return super().prepare_model(model, False, True)  # autocast, but no DDP; the Engine places the shards

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepares one object, as `prepare` does."""
        if not self._is_preparing:
            return self.prepare(optimizer, device_placement=[device_placement])
        if not isinstance(optimizer, PreparedOptimizer):
            optimizer = PreparedOptimizer(optimizer, self)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _expect_preparable(self, args: Iterable[Any]) -> None:
        models = _kinds(torch.nn.Module, (*self._models, *args))
        if len(models) > 1:
            raise Error(f"prepare got more than one model ({', '.join(models)}), but the Engine of an Accelerator trains one. [T0774] hint: make "
                        "an Accelerator for each; after free_memory() one takes another")
        optimizers = _kinds(torch.optim.Optimizer, (*self._optimizers, *args))
        if len(optimizers) > 1:
            raise Error(f"prepare got more than one optimizer ({', '.join(optimizers)}), but the Engine of an Accelerator has one. "
                        "[T0775] hint: make one, with groups of parameters")
        has_model = bool(self._models) or any(isinstance(each, torch.nn.Module) for each in args)
        for each in args:
            name = type(each).__name__
            if isinstance(each, (DummyOptim, DummyScheduler)):
                raise Error(f"prepare got a {name}, which stands for what DeepSpeed would make. [T0776] hint: give AdamW, Adam or SGD of "
                            "torch.optim, and a scheduler of torch.optim.lr_scheduler")
            if isinstance(each, torch.optim.Optimizer) and not has_model:
                raise Error(f"prepare got {name} before the model that it updates. [T0777] hint: pass both together, or the model first")
            if isinstance(each, AcceleratedOptimizer) and each not in self._optimizers:
                raise Error(f"prepare got {type(each.optimizer).__name__} that another Accelerator has prepared. [T0778] hint: give it the "
                            "optimizer itself")
            if isinstance(each, torch.nn.parallel.DistributedDataParallel):
                raise Error("prepare got what DistributedDataParallel made of a model. [T0779] hint: pass the model itself")
            if is_compiled_module(each):
                raise Error("prepare got what torch.compile made of a model. [T0780] hint: pass the model itself, and call compile() on its "
                            "blocks before")
            owner = _owners[each]() if isinstance(each, torch.nn.Module) and each in _owners else None
            if owner is not None and owner is not self and owner.engine is not None:
                raise Error(f"prepare got a {name} that another Accelerator has sharded. [T0781] hint: use that Accelerator, or call its "
                            "free_memory() first")

    def _make_engine(self) -> None:
        """Shards the model. Shards it again if it got its optimizer only after the first time."""
        model, strategy = self._models[0], copy_of(self._given)
        if self._optimizers:
            self._followed = FollowedOptimizer(self._optimizers[0].optimizer, model, "Accelerator", "the program")
            steps = self.gradient_accumulation_steps
            if steps > 1:
                agree(strategy, "gradient_accumulation", steps, "Accelerator(gradient_accumulation_steps)")
            use_manual_schedule(strategy, "the program's optimizer, with its scheduler,")
            self._followed.add_to(strategy)
        else:
            strategy["optimizer"] = {"type": "sgd", "weight_decay": 0.0}  # this rule keeps no state
        name_units(strategy, model)
        if self.engine is not None:
            self.engine.close()
        self.engine = Engine(model, strategy)
        expect_device(self.engine, self.device, "Accelerator")
        self._said = self.engine.strategy
        self._forget_window()
        if model not in _owners:
            model.register_forward_pre_hook(_before_forward)
            model.zero_grad = MethodType(_zero_grad, model)
        _owners[model] = weakref.ref(self)

    def _training(self, what: str) -> Engine:
        """Returns the Engine. Raises an Error if the Engine has no optimizer."""
        if self.engine is None or self._followed is None:
            raise Error(f"{what} needs a model and its optimizer, but prepare got {'no model' if self.engine is None else 'no optimizer'}. "
                        "[T0782] hint: model, optimizer = accelerator.prepare(model, optimizer)")
        return self.engine

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs the Engine's backward. The call is collective.

        As in accelerate, the loss is divided by gradient_accumulation_steps and added up until the optimizer steps.
        `retain_graph=True` means that another loss of the same batch follows. `samples` is the number of samples in
        this rank's batch, for engine.samples_seen and "noise_scale". Other arguments of Tensor.backward raise an Error.
        """
        engine = self._training("backward")
        others = kwargs.keys() - {"retain_graph", "samples"}
        if others:
            raise Error(f"backward got {', '.join(sorted(others))}, which the Engine does not take. [T0783] hint: give a scalar loss, and "
                        "retain_graph where more losses of the batch follow")
        self._expect_zeroed("backward")
        microbatches = self._said["gradient_accumulation"]
        if engine.step_is_due():
            raise Error(f"backward was called more than {microbatches} times before the optimizer's step. [T0784] hint: say "
                        "Accelerator(gradient_accumulation_steps=N) and use accumulate(model), or \"gradient_accumulation\": N in the "
                        "strategy if the loop counts them itself")
        self._has_gradients = True
        part = microbatches / self.gradient_accumulation_steps  # the Engine takes the mean over microbatches itself
        engine.backward(loss if part == 1 else loss * part, **kwargs)

    def _expect_zeroed(self, what: str) -> None:
        if self._has_stepped:
            raise Error(f"{what} after an optimizer's step without zero_grad: PyTorch would add to the gradients of that step, which "
                        "the Engine has used up. [T0785] hint: call optimizer.zero_grad() after each optimizer.step()")

    def _step(self) -> bool:
        """Makes the Engine's step, and returns whether it was skipped. If there was no backward before, this call does
        nothing, like an optimizer whose parameters have no gradients. `optimizer.step()` calls it.
        """
        engine = self._training("step")
        self._expect_zeroed("step")
        if not self._has_gradients:
            _expect_no_gradients(engine.model)
            return False
        self._followed.hand_on(engine)
        self.result = take_step(engine)
        self._norm.fill_(self.result.grad_norm)
        self._forget_window()
        self._has_stepped = True
        return self.result.overflow or self.result.spike

    def _zero_grad(self) -> None:
        """Drops the gradients that no step has used yet. `optimizer.zero_grad()` and `model.zero_grad()` call it."""
        self._forget_window()
        if self.engine is not None:
            self.engine.zero_grad()
            torch.nn.Module.zero_grad(self.engine.model)  # a tensor in .grad shows that the Engine has a gradient

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Checks that the strategy clips at `max_norm`. The next step clips the gradients. Returns a tensor that gets
        the norm in that step. The tensor is NaN until then.
        """
        if norm_type != 2:
            raise Error(f"clip_grad_norm_ got norm_type={norm_type}, but the Engine has the 2-norm alone. [T0786] hint: leave it out")
        self._expect_clipping("clip_grad_norm_", "gradient_clipping", parameters, max_norm)
        return self._norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Checks that the strategy clips at `clip_value`. The next step clips the gradients."""
        self._expect_clipping("clip_grad_value_", "gradient_clip_value", parameters, clip_value)

    def _expect_clipping(self, what: str, key: str, parameters: Any, wanted: float) -> None:
        engine = self._training(what)
        if self._said[key] != float(wanted):
            raise Error(f'the strategy says "{key}": {self._said[key]}, but {what} says {float(wanted)}. [T0787] hint: the Engine clips, in each '
                        f'step: say Accelerator(strategy={{"{key}": {float(wanted)}, ...}})')
        given = {id(each) for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        missing = [name for name, each in engine.model.named_parameters() if each.requires_grad and id(each) not in given]
        if missing:
            raise Error(f"{what} leaves {missing[0]} out, but the Engine clips all gradients together. [T0788] hint: pass model.parameters()")
        if not self.sync_gradients:
            raise Error(f"{what} between microbatches, but the Engine clips the gradients of a whole step. [T0789] hint: call it under `if "
                        "accelerator.sync_gradients:`")

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        raise Error("join_uneven_inputs needs DistributedDataParallel, which is not there. [T0790] hint: leave even_batches at True; with "
                    "tessera.Engine, tessera.uneven is a loop for loaders of different lengths")

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the model's whole state_dict on rank 0, and {} on other ranks. The call is collective."""
        if self.engine is None or model is not self.engine.model:
            return super().get_state_dict(model, unwrap)
        return self.engine.state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """Saves accelerate's files, with whole weights, and a folder "tessera" with everything that is needed to
        continue training. It is collective; call it between steps.
        """
        location = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        if self.engine is not None:
            self.engine.save_checkpoint(os.path.join(location, _FOLDER), keep=1)
        return location

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **load_model_func_kwargs: Any) -> None:
        """Loads the state that save_state saved, on any number of ranks. Random generators need the same number of
        ranks. The call is collective.
        """
        # The Engine loads the weights, with the optimizer's states. accelerate gives the folder that it has found.
        found: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        models, self._models = self._models, []
        try:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        finally:
            self._models = models
            hook.remove()
        if self.engine is not None:
            self._load_engine(self.engine, found[0])

    def _load_engine(self, engine: Engine, folder: str) -> None:
        path = os.path.join(folder, _FOLDER)
        if not os.path.isdir(path):
            raise Error(f"{folder} has no folder {_FOLDER}: another Accelerator wrote it. [T0791] hint: load its weights alone, with "
                        "accelerator.engine.load_weights")
        if self._followed is not None:
            self._followed.follow(engine)
            self._followed.forget_sent()
        for text in engine.load_checkpoint(path).inexact:
            _log.warning(text)

    def free_memory(self, *objects: Any) -> Any:
        """Ends the Engine, too. The model can be prepared again, here or by another Accelerator."""
        if self.engine is not None:
            self.engine.close()
        self.engine = self._followed = None
        self._forget_window()
        return super().free_memory(*objects)


class PreparedOptimizer(AcceleratedOptimizer):
    """The object that `prepare` returns for the program's optimizer. It makes no steps itself: the Engine makes
    them."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: None = None) -> None:
        if closure is not None:
            raise Error("optimizer.step got a closure, which the Engine cannot call. [T0792] hint: call accelerator.backward, and then step()")
        if self.gradient_state.sync_gradients:
            self._is_overflow = self._accelerator._step()
            self.optimizer._opt_called = True  # schedulers expect this

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._accelerator._zero_grad()


def _expect_no_gradients(model: torch.nn.Module) -> None:
    """Raises Error if loss.backward() has made a gradient. The Engine has dropped the gradient, and .grad is a tensor
    that cannot be read.
    """
    if any(each.grad is not None for each in model.parameters()):
        raise Error("step finds gradients of a backward that was not accelerator.backward, which are dropped. [T0793] hint: call "
                    "accelerator.backward(loss) in place of loss.backward()")


def _kinds(kind: type, objects: Iterable[Any]) -> list[str]:
    """Returns the names of the classes of all objects that are of this kind. Each object counts once."""
    found = {id(each): each for each in objects if isinstance(each, kind)}
    return [type(getattr(each, "optimizer", each)).__name__ for each in found.values()]


def _owner(model: torch.nn.Module) -> Accelerator | None:
    """Returns the Accelerator that trains a model; None for a copy of such a model."""
    reference = _owners.get(model)
    return None if reference is None else reference()


def _before_forward(model: torch.nn.Module, _: Any) -> None:
    """Makes the Engine train those parameters that require gradients now and are in a group of the optimizer."""
    owner = _owner(model)
    if owner is not None and owner._followed is not None and torch.is_grad_enabled():
        owner._followed.follow(owner.engine)


def _zero_grad(model: torch.nn.Module, set_to_none: bool = True) -> None:
    """Replaces Module.zero_grad of a prepared model, whose gradients are in the Engine."""
    owner = _owner(model)
    if owner is None:
        torch.nn.Module.zero_grad(model, set_to_none)
    else:
        owner._zero_grad()


def _expect_possible(given: dict[str, Any]) -> None:
    """Raises Error if an argument of accelerate's Accelerator, or a variable, would have no effect, or a wrong
    effect."""
    for name, hint in _REFUSED.items():
        if given.get(name) is not None:
            raise Error(f"Accelerator does not take {name}={given[name]!r:.80}. {hint}")
    for name in _REFUSED_VARIABLES:
        if os.environ.get(name, "false").lower() == "true":
            raise Error(f"{name}=true asks for another way to shard. [T0794] hint: make a strategy of that configuration with python -m "
                        "tessera.import_config, and leave it out here; or start the ranks with `tessera launch`")
    for handler in given.get("kwargs_handlers") or ():
        if isinstance(handler, DistributedDataParallelKwargs):
            raise Error("Accelerator does not take DistributedDataParallelKwargs, since DistributedDataParallel is not there. [T0795] hint: leave "
                        "it out: unused parameters need no option, and the strategy has \"broadcast_buffers\" and \"compression\"")
    project = given.get("project_config")
    if project is not None and project.save_on_each_node:
        raise Error("Accelerator does not take ProjectConfiguration(save_on_each_node=True). [T0796] hint: leave it out, since a checkpoint is "
                    "one folder that all hosts must reach")
