"""What ranks of a program tell each other beside training: metrics, flags, results of an evaluation.

All ranks call each function, in the same order, with equal shapes and dtypes. Calls that differ are an Error (64) on all ranks
that shows each call; nothing has been moved then. A rank that is gone is an Error (75).
"""

from typing import TypeVar, overload

import torch

from tessera import _native
from tessera._error import Error
from tessera._job import expect_one_truth, init

Text = TypeVar("Text", str, bytes)


def _join() -> None:
    if _native.is_joined():
        expect_one_truth()
    else:
        init()


@overload
def all_reduce(value: torch.Tensor, op: str = "sum") -> torch.Tensor: ...
@overload
def all_reduce(value: bool, op: str = "max") -> bool: ...
@overload
def all_reduce(value: int, op: str = "sum") -> int: ...
@overload
def all_reduce(value: float, op: str = "sum") -> float: ...


def all_reduce(value, op="sum"):
    """The "sum", "mean", "min" or "max" over all ranks, the same bits on each. A tensor is changed in place and returned."""
    _join()
    if isinstance(value, torch.Tensor):
        _native.all_reduce(value, op)
        return value
    if isinstance(value, bool):
        if op not in ("min", "max"):
            raise Error(f'all_reduce of a bool has no "{op}". [T0642] hint: take "min" (true on all ranks) or "max" (true on one)')
        return bool(_native.all_reduce_int(int(value), op))
    return _native.all_reduce_int(value, op) if isinstance(value, int) else _native.all_reduce_float(value, op)


@overload
def all_gather(value: torch.Tensor) -> list[torch.Tensor]: ...
@overload
def all_gather(value: Text) -> list[Text]: ...


def all_gather(value):
    """The tensor, str or bytes of each rank, in rank order. Texts may have different lengths."""
    _join()
    if isinstance(value, torch.Tensor):
        return _native.all_gather(value)
    if isinstance(value, str):
        return [text.decode() for text in _native.all_gather_bytes(value.encode())]
    return _native.all_gather_bytes(value)


@overload
def broadcast(value: torch.Tensor, root: int = 0) -> torch.Tensor: ...
@overload
def broadcast(value: Text, root: int = 0) -> Text: ...


def broadcast(value, root=0):
    """Rank `root`'s tensor (in place), str or bytes; what the other ranks give of a text does not count."""
    _join()
    if isinstance(value, torch.Tensor):
        _native.broadcast(value, root)
        return value
    if isinstance(value, str):
        return _native.broadcast_bytes(value.encode(), root).decode()
    return _native.broadcast_bytes(value, root)


def barrier() -> None:
    """Returns when all ranks have called it."""
    _join()
    _native.barrier()


def mean_over_ranks(mean: float, count: int = 1) -> float:
    """The mean of a metric over the samples of all ranks: `mean` is this rank's, over `count` samples."""
    _join()
    return _native.mean_over_ranks(float(mean), count)
