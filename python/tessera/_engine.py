"""Defines the Engine, which trains one module under a strategy."""

import itertools
import json
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DistributedSampler

from tessera import _native
from tessera._data import RankSampler, SamplerCursor
from tessera._error import Error
from tessera._job import closing, engines, expect_one_truth, join, plain_values, rank, read_strategy
from tessera._lent_arrays import copy_lent_arrays
from tessera._lists import let_lists_be_read
from tessera._loop import SyncBatchNorm
from tessera._mirror import Mirror
from tessera._rules import CommHook, ElementwiseOptimizer, MatrixOptimizer, own_rules

Strategy = str | os.PathLike | Mapping


class _Evaluation(NamedTuple):
    loss: float
    batches: int


class Evaluation(_Evaluation):
    """The result of `Engine.evaluate`: a pair of `loss` and `batches`.

    `loss` is the weighted mean over all batches of all ranks. `batches` is the number of these batches.
    """

    weight: float
    """sum over all batches of all ranks; the number of batches if no weights were given"""

    def __new__(cls, loss: float, batches: int, weight: float | None = None) -> "Evaluation":
        self = super().__new__(cls, loss, batches)
        self.weight = float(batches) if weight is None else weight
        return self


def _expect_forward_meets_nobody(model: torch.nn.Module, strategy: dict[str, Any]) -> None:
    """Raises Error (78) if the model has a SyncBatchNorm and the strategy lets ranks run forward at different times, or
    wants results that do not depend on the ranks. The Engine itself finds only a SyncBatchNorm of C++, since it checks
    only the C++ class of a module.
    """
    def norms_of_ranks() -> list[str]:
        return [name or "(root)" for name, module in model.named_modules() if isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm))]

    if strategy.get("reproducible") and (names := norms_of_ranks()):
        raise Error(f"/reproducible: module {names[0]} is a SyncBatchNorm, which normalises over the microbatches that ranks compute at one time, "
                    "so what it computes depends on the number of ranks. [T1160] hint: take BatchNorm, with \"broadcast_buffers\": "
                    "\"microbatch_order\"", 78)
    key = "/deal/by" if strategy.get("deal", {}).get("by") == "speed" else "/sync/type"
    if key == "/sync/type" and strategy.get("sync", {}).get("type") not in ("asynchronous", "backups", "hogwild"):
        return
    for name in norms_of_ranks():
        raise Error(f"{key}: module {name} is a SyncBatchNorm, whose forward waits for "
                    "all ranks, and ranks do not run forward together here. [T0938] hint: take BatchNorm, or leave the key out", 78)


class Engine:
    """Trains a module under a strategy.

        engine = tessera.Engine(model, "strategy.json")
        loss = model(input, target)      # the model's own forward may be called in any way
        engine.backward(loss)
        result = engine.step()

    The constructor is collective: all ranks call it with equal modules and strategies. It joins the job if the program
    has not done so. It gives all ranks rank 0's values of parameters and buffers, and shards the parameters. Parameters
    keep their identity. Operators then gather the parameters that they read. Code that takes a parameter's memory
    without an operator (numpy(), data_ptr(), torch.save) must use `gathered`. The Engine removes `.grad` as soon as
    backward has made it. The dtype of parameters is mixed_precision.param.

    Hooks of the program on tensors and modules run as always. A post-accumulate hook gets only the gradient of this
    rank, and must be registered before the Engine is made. Errors are raised as `Error`. An error of the constructor,
    `backward`, `step` or a gather ends the job on all ranks, except for exit code 64. Code 64 means a call at the wrong
    time or a wrong argument. A call that raises code 64 has changed nothing.

    `own`: the program's own rules, if the strategy requires them. A rule is an `ElementwiseOptimizer`, a
    `MatrixOptimizer` or a `CommHook`. Each rank gives objects of the same classes.

    Only one thread at a time may use an Engine. Worker processes of a DataLoader may be forked while the Engine exists,
    but they cannot use the Engine.
    """

    def __init__(self, model: torch.nn.Module, strategy: Strategy, *own: ElementwiseOptimizer | MatrixOptimizer | CommHook) -> None:
        strategy, rules = read_strategy(strategy), own_rules(own)
        mirror = Mirror(model)
        _expect_forward_meets_nobody(model, json.loads(strategy.to_json()))
        join(strategy)
        let_lists_be_read()
        copy_lent_arrays()
        self.model = model
        self._native: _native.Engine | None = _native.Engine(mirror.native, strategy, rules)
        self._mirror: Mirror | None = mirror
        self._steps_write_buffers = json.loads(self._native.strategy())["broadcast_buffers"] != "none"
        self._parameters = set(model.parameters())
        self._note_members()
        closing.add(self)
        engines.add(self)

    def backward(self, loss: torch.Tensor, *, tokens: int = 0, samples: int = 0, retain_graph: bool = False,
                 weight: float | torch.Tensor = 1.0) -> None:
        """Runs backward of one microbatch; it is collective. `loss` is a scalar: the mean over this rank's microbatch.

        Gradients are averaged over ranks and over the `gradient_accumulation` microbatches of a step. Do not divide the
        loss by `gradient_accumulation`, as loops without an Engine do. `tokens` is used for
        StepResult.tokens_per_second, and `samples` for lr_schedule.base_batch_size, warmup_samples and warmup_epochs.
        `retain_graph=True` means that more losses of this microbatch follow. The losses add up, and the call with the
        last loss gives `samples`.

        `weight` is the number of items over which the loss is a mean: tokens with a label, pixels, samples. Give
        `weight` if microbatches differ in this number. The step then trains with the mean over all items, and
        StepResult.loss is that mean:

            engine.backward(loss, weight=(labels != -100).sum())

        Only ratios of weights count. Give numbers near 1 with fp16 parameters. Weight 0 makes this backward take part
        in the collectives without adding anything. Raises Error (64) if it is called at the wrong time, or if the loss
        is no scalar.
        """
        backward(loss, [self], tokens=tokens, samples=samples, retain_graph=retain_graph, weight=weight)

    def backward_nothing(self) -> None:
        """Runs a microbatch on a rank that has no batch while other ranks have one: the rank joins the collectives of
        the other ranks and adds nothing to the sums.

        The call repeats the communication of this rank's latest microbatch, so the rank needs an earlier microbatch. No
        earlier microbatch is needed inside `uneven`, where the other ranks tell this rank what to communicate. A module
        whose forward makes its own collectives needs a batch on every rank. `uneven` calls it for loaders of different
        lengths. Raises Error (64) if there was no microbatch before, and before a step's first microbatch if several
        ranks are one replica (sync.replica_ranks): the other ranks of the replica would wait for this rank's pulls.
        """
        self._live().backward_nothing()

    def step(self, *, partial: bool = False) -> _native.StepResult:
        """Makes an optimizer step after `gradient_accumulation` calls of backward, and returns a description of the
        step.

        It is collective: ranks agree on norm and overflow, and then clip and update. `partial` allows an earlier step,
        after at least one microbatch: the step takes the mean over the microbatches so far. An epoch of a program may
        end in the middle of a window (the microbatches of one step). The program may then continue with the next epoch,
        whose first microbatches fill the window. The program may also drop the window with zero_grad. Raises Error (64)
        if called early without `partial`.
        """
        engine = self._live()
        if self._steps_write_buffers:
            self._mirror.refresh()
        return engine.step(partial)

    def step_is_due(self) -> bool:
        """Returns True if all microbatches of a step are done, so that the program should call `step` next."""
        return self._live().step_is_due()

    def take_step(self, steps: int, data_order: int = 0) -> int | None:
        """Returns the number of the step whose data this worker takes next, if workers may join and leave
        ("sync.elastic").

        The `steps` steps that all workers make together are counted from 0. Each step is given to one worker, and to
        another worker if the first worker leaves before it has made the step. While other workers make the last steps,
        the call waits. When all steps are made, it returns None, and the parameters have their final values. A worker
        may take several steps in advance, and makes them in the order in which it took them. Returns None also if this
        worker itself has taken the last steps in advance (`steps_are_over` distinguishes the two cases).

            while (step := engine.take_step(1000, batches.data_order)) is not None:
                batches.go_to_step(step)
                while not engine.step_is_due():
                    engine.backward(loss_of(batches.next()))
                engine.step()
            if engine.writes_results():
                engine.save_weights("weights.pt")
                engine.note_results_written()

        `data_order` is a number that identifies the data of all steps, such as `TokenBatches.data_order`. A program
        with data of its own may make it from the number of samples, its seed and its batch. `StepSampler` calls this
        for a DataLoader. Raises Error: 64 without "sync.elastic", or if other workers give other numbers; 75 if the
        other workers do not finish within comm.timeout_s.
        """
        return self._live().take_step(steps, data_order)

    def steps_are_over(self) -> bool:
        """Returns whether `take_step` has reported that all steps are made."""
        return self._live().steps_are_over()

    def writes_results(self) -> bool:
        """Returns whether this process should write the results of the run.

        Rank 0 writes them. If workers may join and leave, one of the workers that run at the end writes the results. If
        that worker leaves without `note_results_written`, the next worker that asks writes them too, with the same
        values.
        """
        return self._live().writes_results()

    def note_results_written(self) -> None:
        """Records that this process has written the results of the run.

        If workers may join and leave, no later worker is told to write the results again. Without "sync.elastic" the
        call does nothing. If server 0 is lost, this process still ends without an error, and the log says that the
        results are not recorded. Raises Error (64) if another worker writes them.
        """
        self._live().note_results_written()

    def microbatch(self) -> int:
        """Returns the number of the microbatch that this rank computes next, among the microbatches of its step on all
        ranks.

        The number tells which data to take, so that any number of ranks trains on the same data (docs/reproducible.md).
        The microbatch may belong to another rank with "deal.backups", so call this before each forward
        (`TokenBatches.of`).
        """
        return self._live().microbatch()

    def microbatches(self) -> range:
        """Returns the microbatches of this step that this rank computes. They are neighbours among the microbatches of
        all ranks.

        A step may change them with "deal" by speed: call this after each step, and give the result to
        `TokenBatches.deal` or `RankSampler.deal`. Raises Error (64) if the ranks take a step's microbatches in turn,
        since a rank's microbatches are then not neighbours.
        """
        return range(*self._live().microbatches())

    def zero_grad(self) -> None:
        """Drops the microbatches that were begun since the last step. All ranks call it at the same place."""
        self._live().zero_grad()

    def gathered(self, write: bool = False, *, ema: bool = False, parameters: Sequence[torch.Tensor] | None = None) -> "Guard":
        """Returns a guard: inside `with engine.gathered():` parameters have their full values in memory on every rank.

        `parameters` restricts the guard to the units of these parameters. `write` copies rank 0's values to all ranks
        at the end. Without `write`, the end raises Error (64) if a parameter was written, also through an array of
        numpy or DLPack over its memory. A `gathered(write=True)` inside such a guard raises Error (64) at once. `ema`
        shows the averages of the weights.

        The call is collective and belongs between steps. If an exception leaves the block, no values are written back,
        and the other ranks do not wait. Raises Error (64) if it is called at the wrong time.
        """
        if write and ema:
            raise Error("gathered: write and ema exclude each other, since averages are not what is trained. [T0643] hint: write without ema=True")
        mode = "write" if write else "ema" if ema else "read"
        arguments = (mode,) if parameters is None else (mode, self._own("gathered", parameters))
        return Guard(lambda: self._live().gathered(*arguments))

    def _own(self, call: str, parameters: Any) -> list[torch.Tensor]:
        """Returns `parameters` as a list. Raises Error (64) if one of them is not a parameter of the module."""
        is_one = isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable)
        found = [parameters] if is_one else list(parameters)
        for each in found:
            if not isinstance(each, torch.Tensor) or each not in self._parameters:
                what = f"a tensor of shape {list(each.shape)}" if isinstance(each, torch.Tensor) else f"a {type(each).__name__}"
                raise Error(f"{call}: parameters= has {what}, which is no parameter of the Engine's module. [T1074] hint: give the "
                            "module's parameters themselves, as in parameters=model.head.parameters()")
        return found

    def ema_weights(self) -> "Guard":
        """Returns a guard: inside `with engine.ema_weights():` parameters have the averages of their weights as values,
        still sharded.

        The strategy needs "ema". The call is collective, between steps. Raises Error (64) without "ema" or at the wrong
        time.
        """
        return Guard(lambda: self._live().ema_weights())

    def evaluate(self, loader: Iterable, loss_of: Callable[[Any], Any]) -> Evaluation:
        """Returns the mean of `loss_of(batch)` over the batches of all ranks, computed without gradients.

        `loss_of` returns a scalar tensor or a number, or a pair (loss, weight) whose loss is a mean over `weight`
        items. Weights make the result the same for any number of ranks and any batch size:

            engine.evaluate(loader, lambda batch: (model(batch.x, batch.y), len(batch.x)))

        A DataLoader with a DistributedSampler or a RankSampler gives each sample once here, although the sampler itself
        would give some samples twice.

        Ranks may have different numbers of batches, but each rank needs at least one batch. Put the module in eval mode
        first. The call is collective. Raises Error (64) on all ranks if a rank has no batch. If `loss_of` returns
        something that is no loss, its rank raises Error (64) and the others get a loss of NaN. The job can continue
        after both errors.
        """
        engine = self._live()
        try:
            batches = _each_once(loader)
        except TypeError as error:
            raise Error(f"evaluate wants batches to iterate over, got {type(loader).__name__}: {error}. "
                        "[T0644] hint: give a list or a DataLoader") from error
        losses = _Losses(loss_of)
        found = engine.evaluate(losses.of_this_rank(batches), losses)
        if losses.problem is not None:
            raise Error(losses.problem)
        return Evaluation(*found)

    def set_lr(self, lr: float, group: str | None = None) -> None:
        """Sets the learning rate from the next step on, for all parameters or for one group, with lr_schedule.type "manual".

        All ranks make the same call. Raises Error (64) if lr_schedule.type is not "manual", the number is not in 0 to
        1000, or the group is unknown. The next step raises Error (64) if ranks have different rates.
        """
        self._live().set_lr(lr, *(() if group is None else (group,)))

    def set_option(self, name: str, value: float | bool | Sequence[float], group: str | None = None) -> None:
        """Sets a number of the update rule from the next step on, by its key in the strategy's "optimizer".

        Keys are weight_decay, betas (two numbers), eps, momentum, dampening, nesterov, alpha, lr_decay and
        muon.momentum, as far as the rule has them. A number without `group` is for all parameters, except those in
        groups of optimizer.groups that have their own number. All ranks make the same call. Raises Error (64) if the
        rule does not have the key. Raises Error (64) also for momentum if momentum is 0 in the strategy, since the plan
        then has no memory for it.
        """
        numbers = tuple(float(each) for each in value) if isinstance(value, Sequence) else float(value)
        if isinstance(numbers, tuple) and len(numbers) != 2:
            raise Error(f"set_option: {name} wants one number, or two for betas, got {len(numbers)}. "
                        '[T0645] hint: write as in set_option("eps", 1e-8) or set_option("betas", (0.9, 0.95))')
        self._live().set_option(*(() if group is None else (group,)), name, numbers)

    def options(self, group: str | None = None) -> dict[str, float | tuple[float, float]]:
        """Returns the numbers that `set_option` sets, by key, with their values in the next step. Without `group` they
        are the numbers of all parameters.
        """
        found = self._live().options(*(() if group is None else (group,)))
        return {name: numbers[0] if len(numbers) == 1 else tuple(numbers) for name, numbers in found.items()}

    def lr(self, group: str | None = None) -> float:
        """Returns the learning rate of the next step, for all parameters or for one group. Raises Error (64) if the
        group is unknown.
        """
        return self._live().lr(*(() if group is None else (group,)))

    def set_trainable(self, pattern: str | Sequence[str], trainable: bool) -> None:
        """Makes the parameters whose name matches `pattern` (`*`, `?`), or one of several patterns, trainable or
        frozen.

        Memory is planned again: a frozen parameter has no gradients. The optimizer states of a frozen parameter stay in
        the host's memory and are used when it trains again, as with an optimizer of torch.optim. Checkpoints hold them
        too. The call is collective and belongs between steps. Raises Error (64) if a pattern matches nothing or if the
        step's microbatches have begun.
        """
        self._live().set_trainable([pattern] if isinstance(pattern, str) else list(pattern), trainable)

    def add_group(self, group: Mapping[str, Any]) -> None:
        """Puts parameters into a new group and makes them trainable, as `add_param_group` of torch.optim does.

        `group` is an entry in the form of the strategy's "optimizer.groups": {"name": "backbone", "match":
        ["backbone.*"], "lr_ratio": 0.1}. The call is collective and belongs between steps. Raises Error (78) if a
        pattern matches nothing, or a parameter is in another group.
        """
        self._live().add_group(json.dumps(plain_values(group)))

    def state_dict(self) -> dict[str, Any]:
        """Returns, on rank 0, the dict that `model.state_dict()` would return without Tessera, as copies. Returns {} on
        other ranks.

        Parameters have their compute dtype. One unit is gathered at a time. The call is collective. `save_weights` does
        the same without memory for a whole model.
        """
        engine = self._live()
        values = self.model.state_dict(keep_vars=True)
        units = engine.unit_names()
        by_unit: dict[str, list[torch.Tensor]] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value in self._parameters:
                unit = max((unit for unit in units if name.startswith(unit + ".")), key=len, default="")
                by_unit.setdefault(unit, []).append(value)
        full: dict[torch.Tensor, torch.Tensor] = {}
        for unit in by_unit.values():
            with self.gathered(parameters=unit):
                if rank() == 0:
                    full.update((each, each.detach().cpu().clone()) for each in unit if each not in full)
        # Values that are no parameters are copied on every rank, since copying a view of a parameter makes all ranks
        # gather the parameter.
        result = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value not in self._parameters:
                copy = value.detach().cpu().clone()
            else:
                copy = full.get(value) if isinstance(value, torch.Tensor) else value
            if rank() == 0:
                result[name] = copy
        return result

    def save_weights(self, path: str | os.PathLike, *, replace: bool = True, form: str = "dictionary") -> None:
        """Writes full parameters and buffers into one file as torch.save does, unit by unit.

        `torch.load(path, weights_only=True)` reads the file, and `load_state_dict` takes the result. Buffers have rank
        0's present values. Buffers of `persistent=False` are left out. `form="archive"` writes a file that C++ reads
        with `torch::load(module, path)`, if the module has the same names. Python reads that file with
        `torch.jit.load(path).state_dict()`. `load_weights` reads both forms.

        It is collective; call it between steps. Raises Error on all ranks if rank 0 cannot write: 73 if the file cannot
        be created, or if it exists and `replace` is False; 74 if a write fails or the disk is full; 77 if permission is
        missing.
        """
        if form not in ("dictionary", "archive"):
            raise Error(f"save_weights has the forms dictionary and archive, got {form!r}. "
                        '[T0646] hint: take "dictionary" for torch.load in Python, or "archive" for torch::load in C++')
        engine = self._live()
        self._mirror.refresh_for_weights()
        _native.save_weights(engine, os.fspath(path), replace, form == "archive")

    def load_weights(self, path: str | os.PathLike, *, part: str = "", without: Sequence[str] = (), ignored: Sequence[str] = ()) -> None:
        """Gives parameters and buffers the values of a file of weights, unit by unit, in the dtypes of the strategy.

        fp32 masters get the file's values. Optimizer states stay as they are. `tessera.load_weights` describes the
        files that it reads, and the meaning of the options.

        It is collective; call it between steps. Only rank 0 reads. Raises Error on all ranks: 66 if the file is
        missing; 65 if it is damaged, of another kind, or of another model.
        """
        engine = self._live()
        self._mirror.refresh_for_weights()
        _native.load_weights(engine, os.fspath(path), part, _names(without), _names(ignored))

    def save_checkpoint(self, folder: str | os.PathLike, *, tensors: Mapping[str, torch.Tensor] | None = None,
                        json: Mapping[str, Any] | None = None, data: SamplerCursor | None = None, keep: int = 0, best: bool = False) -> str:
        """Makes a new folder inside `folder` with everything that is needed to continue training, and returns the path
        of the new folder.

        `folder`/latest then names the new folder. `tensors` and `json` (values that the json module writes) are taken
        from rank 0, and `load_checkpoint` returns them. It also returns `data`, the position in the data:
        `TokenBatches.cursor()`. The last `keep` checkpoints stay in the folder; 0 keeps all. `best=True` makes
        `folder`/best name this checkpoint. This checkpoint stays until another checkpoint is the best. Python's and
        numpy's generators are not saved. Buffers of `persistent=False` that were made after the Engine are not saved
        either. The call is collective and belongs between steps.

        With `"checkpoint": {"async": true}` in the strategy, the call returns as soon as the state is copied. A thread
        writes the copy while training continues. If that save fails, the next step, save or load raises its Error on
        every rank. Raises Error: 64 if it is called at the wrong time, or if JSON cannot hold `json`; 73, 74 or 77 if a
        file cannot be written.
        """
        items = _items("save_checkpoint", tensors, json, data)
        engine = self._live()
        self._mirror.refresh_for_checkpoint()
        return _native.save_checkpoint(engine, os.fspath(folder), items, keep, best)

    def finish_checkpoint(self) -> None:
        """Waits until the asynchronous save is committed. If the save fails, this call raises its Error. The call does
        nothing if no save is under way. The call is collective.
        """
        _native.finish_checkpoint(self._live())

    def checkpoint_progress(self) -> "_native.CheckpointProgress | None":
        """Returns the progress of this rank's asynchronous save; None if no save is under way."""
        return _native.checkpoint_progress(self._live())

    def load_checkpoint(self, path: str | os.PathLike) -> "LoadedCheckpoint":
        """Loads everything that a checkpoint holds into the Engine, at any number of ranks and under any strategy. The
        call is collective.

        `path` is a checkpoint, a folder with `latest`, or `folder`/best. The module's buffers must exist in the sizes
        that were saved: run a forward first if forward creates them. Raises Error on all ranks: 66 if there is no
        checkpoint; 65 if it is damaged, or of another model or optimizer; 74 if a file cannot be read; 64 if the call
        is made at the wrong time; 78 if both runs are "reproducible" and computed with different threads or
        instructions, unless the environment has TESSERA_ALLOW_OTHER_PROCESSOR=1.
        """
        engine = self._live()
        self._mirror.refresh_for_checkpoint()
        return LoadedCheckpoint(_native.load_checkpoint(engine, os.fspath(path)))

    def commit_durable(self, *, tensors: Mapping[str, torch.Tensor] | None = None, json: Mapping[str, Any] | None = None,
                       data: SamplerCursor | None = None) -> bool:
        """Starts a durable commit after each K-th step, and returns True if it has started one. Call it after every
        step, on all ranks.

        The strategy needs `"durable": {"every": K, "dir": D}`. A commit writes to the disk of each host everything that
        is needed to continue training. A run that was ended at any moment continues from the last commit
        (`resume_durable`), bit for bit, with the same model, strategy and ranks. With `"reproducible"`, and without a
        GPU, it may also have another number of ranks. The commit is written during the next
        forward and backward. All ranks wait for it before the next update. `tensors`, `json` and `data` have the
        meaning that they have for `save_checkpoint`. If the commit fails, the next call raises its Error.
        """
        items = _items("commit_durable", tensors, json, data)
        engine = self._live()
        self._mirror.refresh_for_checkpoint()
        return _native.commit_durable(engine, items)

    def finish_commit(self) -> None:
        """Waits until the commit under way is on the disks of all hosts. If the commit fails, this call raises its
        Error. Make it the last call of the program. It is collective.
        """
        _native.finish_commit(self._live())

    def resume_durable(self) -> "LoadedCheckpoint | None":
        """Continues from the last commit in the folder "durable.dir"; returns None if there is none. Call it in every
        run, before the run's first step. It is collective. With `"reproducible"`, another number of ranks may have made
        the commit: the Engine has made a checkpoint of it, which is loaded here.
        """
        engine = self._live()
        self._mirror.refresh_for_checkpoint()
        loaded = _native.resume_durable(engine)
        return None if loaded is None else LoadedCheckpoint(loaded)

    def close(self) -> None:
        """Ends the Engine. Replicated parameters keep their values; sharded parameters cannot be used until the module
        has its next Engine.

        A program needs this call if the next Engine is made while something still refers to this Engine, as in a
        notebook.
        """
        self._native = self._mirror = None

    @property
    def strategy(self) -> dict[str, Any]:
        """Returns the strategy in use, with every key present."""
        return json.loads(self._live().strategy())

    @property
    def device(self) -> torch.device:
        """Returns the device of the parameters. Inputs must be on this device too."""
        return self._live().device()

    @property
    def plan(self) -> _native.PlannedMemory:
        """Returns the memory plan of this rank: `use` (bytes by category), `total`, `table`."""
        return self._live().plan()

    @property
    def allocated(self) -> dict[str, int]:
        """Returns the bytes in use now, by category."""
        return self._live().allocated()

    @property
    def traffic(self) -> dict[str, float]:
        """Returns counts, bytes and seconds, by name, of everything that this rank has communicated and moved since the
        Engine was made."""
        return self._live().traffic()

    @property
    def steps_applied(self) -> int:
        """Returns the number of steps that updated parameters. Skipped steps do not count."""
        return self._live().steps_applied()

    @property
    def samples_seen(self) -> int:
        """Returns the number of samples of all ranks in the steps that updated parameters, as given to `backward`.

        If replicas train apart ("sync"), a step's samples are counted as this replica's samples times the number of
        replicas. With "sync" asynchronous and hogwild, only the samples of this rank count, or those of the ranks of its
        replica (sync.replica_ranks).
        """
        return self._live().samples_seen()

    def set_epoch_samples(self, samples: int) -> None:
        """Sets the number of samples of an epoch over all ranks, for lr_schedule.warmup_epochs; this number replaces
        lr_schedule.epoch_samples.

        Call it before the first backward, and again after a load. It is collective.
        """
        self._live().set_epoch_samples(samples)

    @property
    def loss_scale(self) -> float:
        """Returns the loss scale of the next backward; 1.0 unless parameters are fp16."""
        return self._live().loss_scale()

    def time_data(self) -> None:
        """Measures StepResult.data_seconds from the next step on, under any strategy.

        If parameters are gathered, the seconds are always measured. If not, the measurement costs a few allocations of
        LibTorch in each step.
        """
        self._live().time_data()

    def set_peak_tflops(self, tflops: float) -> None:
        """Sets the peak of this rank's device in TFLOP/s, for StepResult.mfu from the next step on.

        Tessera has a table with the peaks of data-center GPUs, for matrix products in the parameters' dtype. Raises
        Error (64) if `tflops` is no number above 0.
        """
        self._live().set_peak_tflops(tflops)

    def time_calls(self) -> None:
        """Starts histograms of how long each unit's gathers and reductions take. The histograms run until the Engine
        ends.

        They have a fixed size of 5 KiB for each unit, which is not part of the plan. On a GPU the device's clock
        measures the time of a call. The time begins when the stream reaches the place at which the call was queued, and
        ends when the stream has waited for the call.
        """
        self._live().time_calls()

    @property
    def staleness(self) -> dict[str, int]:
        """Returns how many of this rank's gradients had each age so far ("sync" asynchronous and hogwild). Returns {}
        for other strategies.

        The keys are ages: "0" to "7", then "8-15", "16-31", "32-63" and "64+". Ages without a gradient are left out.
        """
        return self._live().staleness()

    @property
    def latencies(self) -> list[dict[str, Any]]:
        """Returns the times that `time_calls` has measured so far: a dict for the gathers of each unit, then a dict for
        the reductions of each unit.

        `call` is "gather" or "reduce", `unit` is one of `unit_names`, and `count` is the number of calls. `p50`, `p95`,
        `p99` and `max` are seconds from a call's beginning to the moment at which this rank noticed its end.
        """
        return self._live().latencies()

    @property
    def unit_names(self) -> list[str]:
        """Returns the paths of the units; the root, "(root)", comes first."""
        return self._live().unit_names()

    def enter_forked_process(self) -> None:
        """Makes parameters refuse access in a process that was forked from this process. The package calls it after
        each fork.
        """
        if self._native is not None:
            self._native.enter_forked_process()

    def __reduce__(self):
        raise Error("an Engine cannot be pickled or copied: it is a part of a running job. "
                    "[T0647] hint: use save_checkpoint, state_dict or save_weights")

    def _live(self) -> _native.Engine:
        if self._native is None:
            raise Error("this Engine was closed. [T0648] hint: make another, and load the checkpoint or weights that this one saved")
        expect_one_truth()
        return self._native

    def _expect_known_parameters(self) -> None:
        """Raises Error if a parameter was added after the Engine was made, since the parameter would get gradients, but
        no updates.
        """
        if _native.dicts_hold(self._dicts, self._members):
            return
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter not in self._parameters:
                raise Error(f"parameter {name} was put into the module after the Engine was made, which does not train it. [T0649] hint: change the "
                            "module first, or close() the Engine and make another")
        self._note_members()

    def _note_members(self) -> None:
        """Stores which parameters and modules the module tree has now. Hooks on registrations are not enough: a program
        may also write into `Module._parameters`, or insert a module whose parameters it registered earlier.
        """
        self._dicts = [each for module in self.model.modules() for each in (module._parameters, module._modules)]
        self._members = [*itertools.chain.from_iterable(map(dict.values, self._dicts))]


def backward(loss: torch.Tensor, engines: Sequence[Engine], *, tokens: int = 0, samples: int = 0, retain_graph: bool = False,
             weight: float | torch.Tensor = 1.0) -> None:
    """Runs backward of one loss that trains several Engines' modules. The call is collective.

    Each Engine takes its own gradients; all other gradients are dropped. The arguments are those of `Engine.backward`.
    """
    natives = []
    for engine in engines:
        natives.append(engine._live())
        engine._expect_known_parameters()
    if not isinstance(loss, torch.Tensor):
        raise Error(f"backward wants the scalar tensor that forward computed, got {_kind_of(loss)}. [T1075] hint: pass the loss itself, "
                    "without item() around it; a model of transformers returns it as .loss")
    counts = []
    for name, count in (("tokens", tokens), ("samples", samples)):
        try:
            counts.append(operator.index(count))
        except TypeError:
            raise Error(f"backward: {name} is a number of things, got {_kind_of(count)}. [T1076] hint: give an integer, such as x.numel() "
                        "or len(x)") from None
    _native.backward(loss, natives, *counts, retain_graph, float(weight))


def uneven(loader: Iterable, engine: Engine, on_step: Callable[[_native.StepResult], Any] | None = None) -> Iterator:
    """Yields the batches of a loader, for a loop in which ranks may have different numbers of batches, as with
    PyTorch's Join.

        for x, y in tessera.uneven(loader, engine):
            engine.backward(loss_of(model(x), y), weight=len(x))
            if engine.step_is_due():
                engine.step()

    The body runs on ranks that have a batch. It makes one backward, and a step if one is due. A rank without a batch
    takes part in the microbatches and steps of the other ranks, but adds nothing to them. When no rank has a batch
    left, the remaining microbatches make a step. An epoch in which each microbatch has its weight therefore trains as
    on one rank. Give `on_step` the actions that all ranks must do after a step (set_lr, a save). This function calls it
    after the steps that this function makes itself. After a step of the body, the body must do these actions. A
    DistributedSampler gives no sample twice here. The ranks exchange one small message for each batch. If the body
    leaves the loop, it must do so on all ranks at the same batch.
    """
    batches, loop = _without_padding(loader), _native.UnevenLoop(engine._live(), on_step)
    missing = object()
    while True:
        batch = next(batches, missing)
        if not loop.next(batch is not missing):
            return
        yield batch


def _each_once(loader: Iterable) -> Iterator:
    """Yields the batches of one pass over an evaluation's loader, without samples that a sampler would give twice."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, RankSampler):
        return _without_padding(loader)
    sampler.gives_once = True
    try:
        return iter(loader)  # this begins the sampler's iteration
    finally:
        sampler.gives_once = False


def _without_padding(loader: Iterable) -> Iterator:
    """Yields the batches of one pass, without samples that a DataLoader's DistributedSampler would give twice."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    sampler = next((each for each in samplers if isinstance(each, DistributedSampler)), None)
    if sampler is None or sampler.drop_last:
        return iter(loader)
    padded = sampler.total_size, sampler.num_samples
    samples = len(sampler.dataset)
    sampler.total_size, sampler.num_samples = samples, len(range(sampler.rank, samples, sampler.num_replicas))
    try:
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))  # this has begun the sampler's iteration
    finally:
        sampler.total_size, sampler.num_samples = padded
    return itertools.chain(first, batches)


class _Losses:
    """Calls the program's loss function for each batch and returns pairs of a scalar tensor and a weight.

    Ranks gather parameters together while they compute a batch, so an exception on one rank would end the job. A result
    that is no loss is therefore stored as a `problem`, and no more batches of this rank are taken.
    """

    def __init__(self, loss_of: Callable[[Any], Any]) -> None:
        self._loss_of = loss_of
        self.problem: str | None = None

    def of_this_rank(self, batches: Iterator) -> Iterator:
        for batch in batches:
            yield batch
            if self.problem is not None:
                return

    def __call__(self, batch: Any) -> tuple[torch.Tensor, float]:
        value = self._loss_of(batch)
        loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
        if _is_number(loss) and _is_number(weight):
            weight = float(weight)
            if math.isfinite(weight) and weight >= 0:
                return loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64), weight
        got = f"({_kind_of(value[0])}, {_kind_of(value[1])})" if isinstance(value, tuple) and len(value) == 2 else _kind_of(value)
        self.problem = ("evaluate: the function must return the loss of the batch, a scalar tensor or a number, or a pair of that and its "
                        f"weight, which is finite and not negative, and returned {got}. [T0650] hint: return loss.mean(), say")
        return torch.tensor(float("nan")), 1.0


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if isinstance(value, numbers.Real):
        return str(value)
    return "None" if value is None else f"a {type(value).__name__}"


def load_weights(model: torch.nn.Module, path: str | os.PathLike, *, part: str = "", without: Sequence[str] = (),
                 ignored: Sequence[str] = ()) -> None:
    """Gives a module the values and dtypes of a file. Call it before an Engine is made of the module, and
    `Engine.load_weights` afterwards.

    The file is written by `torch.save` (a state_dict, also inside other dictionaries), by C++'s `torch::save`, by
    `Engine.save_weights`, or by safetensors. Give the index or the folder of a model in several files. No code in the
    file is executed. All tensors of the file must fit the module, except those that the options leave out. Otherwise no
    value is changed.

    `part` selects one of several dictionaries in the file, by its keys with slashes between: "ema",
    "checkpoint/state_dict". The default selects the dictionary that has the module's names. `without` lists parts of
    names that are ignored, in the file and in the module: "module." of DistributedDataParallel, "_orig_mod." of
    torch.compile, or a prefix such as "model.". `ignored` lists patterns for names in the file that the module need not
    have. Such a pattern has the form of a pattern for file names.

    Raises Error: 66 if the file is missing, 77 if permission is missing; 65 if the file is damaged, does not fit, or is
    of another kind. The message names the kind and a remedy.
    """
    if not isinstance(model, torch.nn.Module):
        raise Error(f"load_weights wants a torch.nn.Module, got {type(model).__name__}. [T0651] hint: of an Engine call its own load_weights")
    tensors = [(name, value) for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)]
    _native.load_weights_into(tensors, os.fspath(path), part, _names(without), _names(ignored))


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


class Guard:
    """The result of `Engine.gathered` and `Engine.ema_weights`, for a `with` statement."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._guard: Any = None

    def __enter__(self) -> None:
        if self._guard is not None:
            raise Error("this guard has begun already. [T0652] hint: call engine.gathered() or engine.ema_weights() anew in each with statement")
        self._guard = self._begin()

    def __exit__(self, kind, value, trace) -> None:
        guard, self._guard = self._guard, None
        if kind is None:
            guard.close()
        else:
            guard.drop()


class LoadedCheckpoint:
    """The result of `Engine.load_checkpoint` and `Engine.resume_durable`."""

    path: str
    """folder of the checkpoint"""
    step: int
    """StepResult.step of the last step that it holds"""
    tensors: dict[str, torch.Tensor]
    """the `tensors` that were saved, the same on every rank"""
    json: dict[str, Any]
    """the `json` that was saved, the same on every rank"""
    data: SamplerCursor | None
    """the place in the data that was saved, for `TokenBatches.resume`; None if none was"""
    inexact: list[str]
    """Sentences that say what differs from the moment of the save; empty if nothing was lost"""

    def __init__(self, native: _native.LoadedCheckpoint) -> None:
        self.path, self.step, self.tensors, self.inexact = native.path, native.step, native.tensors, native.inexact
        self.json = {name: json.loads(text) for name, text in native.json.items()}
        self.data = None if native.data is None else SamplerCursor(*native.data)


def _items(call: str, tensors: Mapping[str, torch.Tensor] | None, texts: Mapping[str, Any] | None,
           data: SamplerCursor | None) -> _native.CheckpointItems:
    if data is not None and not isinstance(data, SamplerCursor):
        raise Error(f"{call}: data is the cursor() of TokenBatches or RankSampler, got a {type(data).__name__}. [T0870] hint: other places go into json=")
    return _native.CheckpointItems(dict(tensors or {}), {name: _dump(call, name, value) for name, value in (texts or {}).items()},
                                   None if data is None else tuple(data))


def _dump(call: str, name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Error(f"{call}: json[{name!r}] cannot be written as JSON: {error}. "
                    "[T0653] hint: numbers, text, lists and dicts can; tensors go into tensors=") from None


def plan(model: torch.nn.Module, strategy: Strategy, *own: ElementwiseOptimizer | MatrixOptimizer | CommHook, world_size: int = 1,
         hosts: int = 1) -> _native.PlannedMemory:
    """Returns the memory plan of one rank in a job of `world_size` ranks on `hosts` hosts, computed without training.
    All numbers are bytes.

    The model may be on the meta device. `own` are the rules that the Engine would get. Raises Error (78) if the
    strategy is wrong.
    """
    return _native.plan(Mirror(model).native, read_strategy(strategy), own_rules(own), world_size, hosts)


@contextmanager
def deferred_init() -> Iterator[None]:
    """Makes a model without memory for its parameters: `with tessera.deferred_init(): model = Model(config)`.

    Values are the same as with eager construction, bit for bit. They are made unit by unit when an Engine is made of
    the model.
    """
    scope = _native.Deferring()
    try:
        with _AsIfReal():
            yield
    finally:
        scope.end()


class _AsIfReal(TorchFunctionMode):
    """Answers, for deferred tensors, the queries that initialising code makes without operators, such as is_meta.

    Deferred tensors report the device "meta". Since PyTorch 2.12 torch.nn.init.trunc_normal_ and other functions skip
    such tensors, so the weights would differ from those of eager construction. Tensor.tolist reads memory, which
    deferred tensors do not have. This class reads the elements with operators instead.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and _native.is_deferred(args[0]):
            if function is torch.Tensor.tolist:
                return _list_of(args[0])
            for question, answer in _ANSWERS:
                if function == question:
                    return answer
        return function(*args, **(kwargs or {}))


_ANSWERS = ((torch.Tensor.is_meta.__get__, False), (torch.Tensor.is_cpu.__get__, True),
            (torch.Tensor.device.__get__, torch.device("cpu")))


def _list_of(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_list_of(row) for row in tensor.unbind()]
