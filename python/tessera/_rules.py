"""Defines the classes of rules that a program gives to its Engine: for updates of elements or matrices, and for sums of
gradients over ranks.

A program derives its rule from one of the classes and gives the object to the Engine. The classes are those of
elementwise_optimizer.h, matrix_optimizer.h and comm_hook.h in include/tessera.
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera import _native
from tessera._error import Error

_MODEL = 70  # the exit code of an exception of the program
_FRAMES_SHOWN = 4  # innermost frames of a traceback: other ranks get about 1,000 characters of an error


@dataclass(slots=True)
class Elements:
    """The argument of `ElementwiseOptimizer.update`: a run of elements of one parameter or of several neighbours.

    The run may begin and end inside a parameter. All tensors are fp32 of shape [n], with the same n, a multiple of 32.
    Padding elements do not belong to the program, and their results are not used. `states` are valid only during the
    call.
    """

    parameters: torch.Tensor
    """the fp32 masters; the values after the call are the result, in place or in another tensor of this shape"""
    gradient: torch.Tensor
    """mean over ranks and microbatches, clipped; the rule may overwrite it"""
    states: list[torch.Tensor]
    """one tensor for each name of `states()`; zeros before the first update, updated in place"""
    lr: float
    """learning rate of this step and group"""
    weight_decay: float
    """weight decay of this group, or the strategy's"""
    step: int
    """how often these elements were updated, this update included"""


class ElementwiseOptimizer(ABC):
    """A program's own update rule that computes each element by itself.

        class SignDescent(tessera.ElementwiseOptimizer):
            def states(self):
                return ["momentum"]

            def update(self, e):
                e.states[0].mul_(0.9).add_(e.gradient, alpha=0.1)
                e.parameters.mul_(1 - e.lr * e.weight_decay).sub_(e.lr * e.states[0].sign())

        engine = tessera.Engine(model, {"optimizer": {"type": "own", "lr": 1e-3}}, SignDescent())

    Parameters, gradients and states are sharded, offloaded, saved in checkpoints and averaged ("ema") like those of the
    built-in rules. The tensors are on the GPU if training runs on one, and on the host with offload.step "cpu".
    `Engine.step` calls the rule, or `Engine.backward` unit by unit with optimizer.in_backward. A call has at most
    32,768 elements on the CPU and 4,194,304 on a GPU.
    """

    @abstractmethod
    def states(self) -> Sequence[str]:
        """Returns the names of the states, which checkpoints use: at most 3, all different, none of them "ema".

        The answer must stay the same as long as the object exists.
        """

    @abstractmethod
    def update(self, e: Elements) -> None:
        """Updates parameters and states.

        The result for an element may depend only on the element's own numbers, lr, weight_decay and step, since the
        ranks and strategy decide where a run begins. Operators that read several elements (sums, norms) or draw random
        numbers are not allowed. An exception leaves `Engine.step` as an Error (70) with the traceback, and ends the job
        on all ranks.
        """


@dataclass(slots=True)
class Matrix:
    """The argument of `MatrixOptimizer.update`. All tensors are fp32, and valid only during the call."""

    parameter: torch.Tensor
    """[rows, columns]: the fp32 master; its values after the call are the result"""
    gradient: torch.Tensor
    """[rows, columns]: mean over ranks and microbatches, clipped; the rule may overwrite it"""
    states: list[torch.Tensor]
    """one tensor for each entry of `states(rows, columns)`; zeros before the first update, updated in place"""
    lr: float
    """learning rate of this step and group"""
    weight_decay: float
    """weight decay of this group, or the strategy's"""
    step: int
    """how often this matrix was updated, this update included"""


class MatrixOptimizer(ABC):
    """A program's own update rule that needs a whole matrix at a time.

        class RowScaledDescent(tessera.MatrixOptimizer):
            def states(self, rows, columns):
                return [("row_norm", (rows, 1))]

            def update(self, m):
                m.states[0].mul_(0.9).add_(m.gradient.norm(dim=1, keepdim=True), alpha=0.1)
                m.parameter.mul_(1 - m.lr * m.weight_decay).sub_(m.lr * m.gradient / (m.states[0] + 1e-8))

        engine = tessera.Engine(model, {"optimizer": {"type": "own_matrix", "lr": 1e-2}}, RowScaledDescent())

    The rule updates parameters of two dimensions, except those of Embedding modules; AdamW updates all other
    parameters. A group can choose another rule for its parameters. One rank computes each matrix, and all ranks get
    about the same amount of work. Parameters, gradients and states are sharded, saved and averaged like those of the
    built-in rules, with the same bits under every strategy. All tensors are on the GPU if training runs on one.
    """

    @abstractmethod
    def states(self, rows: int, columns: int) -> Sequence[tuple[str, Sequence[int]]]:
        """Returns the states of a matrix of this shape as pairs of name and shape: at most 8, with different names.

        No state is called "ema" or "master". States are fp32. The answer must stay the same as long as the object
        exists.
        """

    @abstractmethod
    def update(self, m: Matrix) -> None:
        """Updates parameter and states.

        The result may depend only on the fields of `m`. Ranks and strategy decide which rank makes the call, and a
        generator would draw different numbers on each rank. An exception leaves `Engine.step` as an Error (70) with the
        traceback, and ends the job on all ranks.
        """


@dataclass(slots=True)
class Bucket:
    """The argument of `CommHook.sum`: the gradients of one unit or one bucket. All its parameters have the same dtype.

    Its tensors are valid only during the call.
    """

    unit: str
    """the unit's path: "blocks.3\""""
    index: int
    """number of the bucket, from 0, the same in every step: a hook finds by it what it keeps, such as error feedback"""
    step: int
    """training step, counted from 1"""
    gradients: torch.Tensor
    """[elements], fp32 on the CPU: this rank's contribution. It is that of one microbatch, or of a whole step with
    gradient_sync "last_microbatch". Zeros stand where a parameter got no gradient, and between parameters. The values
    that it has when `sum` returns are the result, in place or in another tensor of this shape."""
    parts: dict[str, torch.Tensor]
    """each parameter's name and its gradient in the parameter's shape, a view of `gradients`"""


class CommHook(ABC):
    """A program's own rule that sums gradients over the ranks, with fewer bits or with only some elements.

        class InBf16(tessera.CommHook):
            def sum(self, bucket, ranks):
                own = bucket.gradients.to(torch.bfloat16)
                bucket.gradients.zero_()
                for each in ranks.all_gather(own):
                    bucket.gradients.add_(each)

        strategy = {"strategy": "SHARD_GRADIENTS", "compression": {"method": {"type": "hook"}}}
        engine = tessera.Engine(model, strategy, InBf16())

    The Engine calls `sum` for each bucket as soon as backward has completed it, in the same order on every rank. Over a
    network a communication thread makes the call while backward continues. Otherwise the thread of backward makes it.
    One call runs at a time. A hook needs NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS. A job of one rank does not call
    it.
    """

    @abstractmethod
    def sum(self, bucket: Bucket, ranks: _native.Ranks) -> None:
        """Replaces `bucket.gradients` by the *sum* over ranks, or by the values that the rule uses instead.

        The Engine divides by the number of ranks. The result must have the same bits on every rank, since the
        parameters of ranks would otherwise become different. `check.replica_hash_every` would report that. An exception
        leaves `Engine.backward` or `Engine.step` as an Error (70) with the traceback, and ends the job on all ranks. An
        interrupt of the program (such as Ctrl-C) ends the job in the same way.
        """


class _Rule:
    """Calls functions of a program's rule, for C++. It checks that a result has the type that C++ expects. Otherwise it
    raises an Error that names the function."""

    _place = ""  # text before the function's name in an error, if C++ does not name the unit

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def _name(self, function: str) -> str:
        return f"{self._place}{type(self._rule).__name__}.{function}"

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._rule, function)(*arguments)
        except Error:
            raise  # for example if an exchange with other ranks failed
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            trace = "".join(traceback.format_tb(error.__traceback__.tb_next, -_FRAMES_SHOWN)).rstrip()  # without this frame
            raise Error(f"{self._name(function)} on rank {_native.rank({})}/{_native.world_size({})} raised {type(error).__name__}: {said:.300}. "
                        f"[T0871] hint: mend what its traceback shows:\n{trace}", _MODEL) from error

    def _run(self, function: str, result: str, *arguments: Any) -> None:
        """Calls a function that returns nothing. `result`: the name of the tensors that the function changes, for
        errors."""
        returned = self._call(function, *arguments)
        if returned is not None:
            raise Error(f"{self._name(function)} returned a {type(returned).__name__}, which nobody would use. "
                        f"[T0872] hint: write the result into {result}, and return nothing")

    def _expect_left(self, function: str, kind: type | tuple[type, ...], name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise Error(f"{self._name(function)} left a {type(value).__name__} in {name}. "
                        "[T0873] hint: leave there what was given, and change tensors in place")

    def _expect_states(self, name: str, states: Any) -> None:
        self._expect_left("update", (list, tuple), name, states)
        for number, state in enumerate(states):
            self._expect_left("update", torch.Tensor, f"{name}[{number}]", state)

    def _expect(self, function: str, good: bool, wanted: str, got: Any) -> None:
        if not good:
            raise Error(f"{self._name(function)} returned {got!r:.200}. [T0874] hint: let it return {wanted}")


class _Elements(_Rule):
    def states(self) -> list[str]:
        names = self._call("states")
        self._expect("states", _is_sequence(names) and all(isinstance(name, str) for name in names), 'a list of names such as ["momentum"]', names)
        return list(names)

    def update(self, *fields: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        e = Elements(*fields)
        self._run("update", "e.parameters", e)
        self._expect_left("update", torch.Tensor, "e.parameters", e.parameters)
        self._expect_states("e.states", e.states)
        return e.parameters, e.states


class _Matrices(_Rule):
    def states(self, rows: int, columns: int) -> list[tuple[str, list[int]]]:
        states = self._call("states", rows, columns)
        good = _is_sequence(states) and all(
            _is_sequence(each) and len(each) == 2 and isinstance(each[0], str) and _is_sequence(each[1])
            and all(isinstance(size, int) for size in each[1]) for each in states)
        self._expect("states", good, 'pairs of name and shape such as [("row_norm", (rows, 1))]', states)
        return [(name, list(sizes)) for name, sizes in states]

    def update(self, *fields: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        m = Matrix(*fields)
        self._run("update", "m.parameter", m)
        self._expect_left("update", torch.Tensor, "m.parameter", m.parameter)
        self._expect_states("m.states", m.states)
        return m.parameter, m.states


class _Sums(_Rule):
    def sum(self, *arguments: Any) -> torch.Tensor:
        *fields, ranks = arguments
        bucket = Bucket(*fields)
        self._place = f"bucket {bucket.unit}: "
        self._run("sum", "bucket.gradients", bucket, ranks)
        self._expect_left("sum", torch.Tensor, "bucket.gradients", bucket.gradients)
        return bucket.gradients


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


_KINDS: dict[type, tuple[int, Callable[[Any], _Rule]]] = {
    ElementwiseOptimizer: (0, _Elements), MatrixOptimizer: (1, _Matrices), CommHook: (2, _Sums)}


def own_rules(rules: Sequence[Any]) -> _native.OwnRules:
    """Returns a program's rules in the form in which an Engine takes them. Raises Error (64) if an object is no rule,
    or if two rules are of the same kind.
    """
    found: list[_Rule | None] = [None] * len(_KINDS)
    for rule in rules:
        kind = next((kind for kind in _KINDS if isinstance(rule, kind)), None)
        if kind is None:
            what = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
            raise Error(f"an Engine was given {what} as a rule of the program's own. [T0875] hint: give it an object of a class that derives from "
                        "tessera.ElementwiseOptimizer, tessera.MatrixOptimizer or tessera.CommHook")
        place, behind = _KINDS[kind]
        if found[place] is not None:
            raise Error(f"an Engine was given two rules of the kind {kind.__name__}. [T0876] hint: give it one of each kind at most")
        found[place] = behind(rule)
    return _native.OwnRules(*found)
