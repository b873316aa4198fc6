"""Exchanges values between the ranks of a program outside of training: metrics, flags, results of an evaluation.

All ranks call each function, in the same order, with equal shapes and dtypes, one thread at a time. If calls differ,
every rank raises an Error (64) that shows each call, and no data have been moved. Error (75) means that a rank has
ended. The first call joins the job if the program has not done so (`tessera.init`).
"""

from typing import Any, NoReturn, TypeVar, overload

import torch

from tessera import _native
from tessera._error import Error
from tessera._job import expect_one_truth, init

Text = TypeVar("Text", str, bytes)

_BYTES = (bytes, bytearray)
_WANTED = "a tensor, a str or bytes"


def _plain(value: Any) -> Any:
    """Converts a number of numpy to a number of Python. Returns any other value, such as a tensor, as it is."""
    is_number = hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    return value.item() if is_number and not isinstance(value, torch.Tensor) else value


def _refuse(call: str, value: Any, wanted: str) -> NoReturn:
    raise Error(f"{call} wants {wanted}, got a {type(value).__name__}. [T1073] hint: make a tensor of numbers, and bytes of other values "
                "(json.dumps, pickle.dumps)")


def join_if_needed() -> None:
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


def all_reduce(value, op=None):
    """Returns the "sum", "mean", "min" or "max" over all ranks, with the same bits on each rank.

    If `op` is not given, the result is the sum, or for bools the maximum: True if any rank has True. A tensor (any
    shape, on any device) is changed in place and returned. A number or bool is returned in the type in which it was
    given; a number of numpy becomes a number of Python. Raises Error (64) for a bool if `op` is not "min" or "max", and
    for a value of another type.
    """
    join_if_needed()
    value = _plain(value)
    if not isinstance(value, (torch.Tensor, int, float)):
        _refuse("all_reduce", value, "a tensor, a number or a bool")
    if op is None:
        op = "max" if isinstance(value, bool) else "sum"
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
    """Returns a list of each rank's tensor, str or bytes, in rank order. Texts may have different lengths."""
    join_if_needed()
    if isinstance(value, torch.Tensor):
        return _native.all_gather(value)
    if isinstance(value, str):
        return [text.decode() for text in _native.all_gather_bytes(value.encode())]
    if not isinstance(value, _BYTES):
        _refuse("all_gather", value, _WANTED)
    return _native.all_gather_bytes(value)


@overload
def broadcast(value: torch.Tensor, root: int = 0) -> torch.Tensor: ...
@overload
def broadcast(value: Text, root: int = 0) -> Text: ...


def broadcast(value, root=0):
    """Returns rank `root`'s tensor, str or bytes. A tensor is changed in place. The texts of other ranks are not
    used."""
    join_if_needed()
    if isinstance(value, torch.Tensor):
        _native.broadcast(value, root)
        return value
    if isinstance(value, str):
        return _native.broadcast_bytes(value.encode(), root).decode()
    if not isinstance(value, _BYTES):
        _refuse("broadcast", value, _WANTED)
    return _native.broadcast_bytes(value, root)


def barrier() -> None:
    """Waits until all ranks have called this function."""
    join_if_needed()
    _native.barrier()


def mean_over_ranks(mean: float, count: int = 1) -> float:
    """Returns the mean of a metric over the samples of all ranks. `mean` is this rank's mean over `count` samples.

    The mean of a rank with a count of 0 is not used. Raises Error (64) on all ranks if a count is negative, or if all
    counts are 0.
    """
    join_if_needed()
    return _native.mean_over_ranks(float(mean), count)
