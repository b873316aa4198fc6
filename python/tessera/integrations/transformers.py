"""Provides the Trainer of `transformers`, with an Engine that trains the model.

    args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=8)
    trainer = TesseraTrainer(model, args, strategy={"strategy": "FULL_SHARD"}, train_dataset=data)
    trainer.train()

`tessera launch` or torchrun starts the ranks. TrainingArguments give the number of microbatches in a step, the clipping
of gradients, and the learning rate. They also give AdamW's numbers, unless the strategy names another update rule. The
strategy, a file or a dict, decides everything else. If the strategy and TrainingArguments both give a value, the two
values must be equal. All ranks call train, evaluate, predict and save_model.
"""

import os
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from tessera._engine import Engine, Strategy
from tessera._error import Error
from tessera._job import join, read_strategy, world_size
from tessera.integrations._arguments import completed, expect_possible
from tessera.integrations._bridge import expect_device, samples_of
from tessera.integrations._groups import plain, watch

_FOLDER = "tessera"  # the Engine's checkpoint, in the folder of the Trainer's checkpoint
_RULES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
          "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}
_log = logging.get_logger(__name__)


class TesseraTrainer(Trainer):
    """A Trainer that shards its model. `engine` is the Engine. The arguments after `strategy` are Trainer's arguments.

    If the strategy has no "units", they are the blocks that the model names in `_no_split_modules`.
    """

    _items: Any = None  # num_items_in_batch of the latest training_step
    _samples = 0  # samples in the batch of the latest training_step

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, *, strategy: Strategy, **trainer: Any) -> None:
        expect_possible(args, trainer)
        strategy = completed(strategy, args, model, self)
        join(read_strategy(strategy))
        if args.world_size != world_size() or args.n_gpu > 1:
            raise Error(f"TrainingArguments see {args.world_size} processes, this one with {args.n_gpu} GPUs, but the "
                        f"job has {world_size()} ranks. [T0731] hint: start a rank for each GPU with `tessera launch` or "
                        "torchrun; without GPUs, set use_cpu=True")
        super().__init__(model, args, **trainer)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise Error("accelerate's environment variables ask for FSDP or DeepSpeed. [T0732] hint: start the ranks with "
                        "`tessera launch` or torchrun, not with `accelerate launch`")
        self.engine = Engine(model, strategy)
        expect_device(self.engine, args.device, "TrainingArguments")
        prepare = self.accelerator.prepare_model  # evaluation_mode: autocast for args.bf16, but no DDP
        self.accelerator.prepare_model = lambda model, *_, **__: prepare(model, False, evaluation_mode=True)
        self.accelerator.backward = self._backward

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Does nothing: the Engine brings each rank's shards to its device."""

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        self.engine.zero_grad()  # drops microbatches of an earlier training that ended within a step
        self.optimizer = self.optimizer or EngineOptimizer(self.engine, self.args.learning_rate)
        return self.optimizer

    def training_step(self, model: torch.nn.Module, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        made = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps an optimizer that it does not know
        if not isinstance(made, EngineOptimizer):
            raise Error(f"{type(self).__name__}.create_optimizer made {type(made).__name__}, which would never step: the Engine updates "
                        'the parameters. [T1077] hint: remove the method; the strategy names the update rule in "optimizer", and groups with '
                        'rates of their own in its "groups"')
        self._items, self._samples = num_items_in_batch, samples_of(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Runs the Engine's backward. The loss is multiplied, so that the Engine's mean is the sum that the Trainer
        expects.

        The Trainer expects that its losses are added up over the microbatches of a step, but the Engine takes their
        mean. The Trainer divides each loss by num_items_in_batch, the number of labels in the step. If
        num_items_in_batch counts only this rank's labels (average_tokens_across_devices=False), it is used as this
        rank's weight. The step is then a mean over all labels.
        """
        microbatches, weight = self.current_gradient_accumulation_steps, 1.0
        is_by_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self._items is not None and is_by_items and not self.args.average_tokens_across_devices:
            weight = float(self._items) / microbatches
        self.engine.backward(loss * microbatches, samples=self._samples, weight=weight)

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        """Does nothing, since Engine.step clips gradients."""

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> torch.Tensor:
        """Returns a tensor that gets its value in the next step. The Trainer reads it after that step, to log it."""
        return self.optimizer.grad_norm

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, self.engine.state_dict() if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.engine.save_checkpoint(os.path.join(output_dir, _FOLDER), keep=1)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Loads nothing yet. The weights are loaded together with the optimizer's state, in
        _load_optimizer_and_scheduler."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, _FOLDER)):
            raise Error(f"{resume_from_checkpoint} has no folder {_FOLDER}: another Trainer wrote it, or one with "
                        "save_only_model. [T0733] hint: load its weights with from_pretrained, and train without "
                        "resume_from_checkpoint")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.optimizer.forget_sent()
            self._spread_rates()
            for text in self.engine.load_checkpoint(os.path.join(checkpoint, _FOLDER)).inexact:
                _log.warning(text)

    def _spread_rates(self) -> None:
        """Gives all groups the rate of the scheduler, since a checkpoint of Tessera 0.1 has only one rate."""
        for name in ("base_lrs", "_last_lr"):
            rates = getattr(self.lr_scheduler, name, None)
            if isinstance(rates, list) and len(rates) == 1:
                setattr(self.lr_scheduler, name, rates * len(self.optimizer.param_groups))

    def _load_best_model(self) -> None:
        with self.engine.gathered(write=True):
            super()._load_best_model()


class EngineOptimizer(torch.optim.Optimizer):
    """The object that the Trainer, its scheduler and callbacks use instead of an optimizer.

    Its groups have the numbers of the Engine's update rule, and its step calls the Engine's step. The first group holds
    the parameters that are in no group of the strategy. The other groups are the strategy's groups, in their order. A
    number that is written into a group is used from the next step on. If the Engine cannot follow a number of
    torch.optim's rule, the line that writes the number raises an Error.
    """

    _is_accelerate_prepared = True  # keeps accelerate from wrapping this optimizer

    def __init__(self, engine: Engine, lr: float) -> None:
        self.engine, self.grad_norm, self.step_was_skipped = engine, torch.zeros(()), False
        self._sent: dict[int, dict[str, Any]] = {}
        said = engine.strategy["optimizer"]
        self._names = [None, *(group["name"] for group in said["groups"])]
        self._numbers = sorted(engine.options())
        ratios = [1.0, *(group["lr_ratio"] for group in said["groups"])]
        # The groups hold no real parameters, since the Engine has them.
        groups = [{"params": [torch.zeros(())], "lr": lr * ratio, **engine.options(name)}
                  for name, ratio in zip(self._names, ratios)]
        self._plain = {**_RULES[said["type"]]([torch.zeros(())]).defaults} if said["type"] in _RULES else {}
        super().__init__(groups, {**self._plain, "lr": lr})
        self._watch()

    def _watch(self) -> None:
        watch(self, self._plain, ("lr", *self._numbers), "the Engine's optimizer")

    def forget_sent(self) -> None:
        """Forgets which numbers were sent to the Engine, since a loaded checkpoint may have given the Engine other
        numbers."""
        self._sent.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads rates and numbers. A checkpoint of Tessera 0.1 has one group, and all groups get its rate."""
        saved = state_dict["param_groups"]
        for index, group in enumerate(self.param_groups):
            group.update({key: value for key, value in saved[min(index, len(saved) - 1)].items() if key != "params"
                          and (index < len(saved) or "lr" in key)})

    def step(self, closure: None = None) -> None:
        for index, (group, name) in enumerate(zip(self.param_groups, self._names)):
            self.engine.set_lr(float(group["lr"]), name)
            numbers = {key: plain(group[key]) for key in self._numbers}
            if self._sent.get(index) != numbers:
                for key, value in numbers.items():
                    self.engine.set_option(key, value, name)
                self._sent[index] = numbers
        result = self.engine.step(partial=True)  # the last step of an epoch may have fewer microbatches
        self.grad_norm.fill_(result.grad_norm)
        self.step_was_skipped = result.overflow or result.spike
