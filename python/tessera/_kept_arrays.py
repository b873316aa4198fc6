"""Lets autograd functions of Python keep arrays of a sharded parameter for their backward."""

import copy
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from tessera._job import closing

_DEPTH, _MOST_VALUES = 4, 4096  # containers inside containers, and all values in them, that are looked at

_set_attribute = BackwardCFunction.__setattr__


def _keep(ctx: BackwardCFunction, name: str, value: Any) -> None:
    """Sets an attribute of the context, as in `ctx.scale = scale.numpy()`. If `value` is an array over the memory of an
    Engine's parameter, a copy is kept. After forward another unit may get this memory. Arrays in lists, tuples and
    dicts are copied too, as far as they are there now: the context then has another container, and the program's own
    stays as it is.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        value = _kept(value, numpy.ndarray, iter(range(_MOST_VALUES)), _DEPTH)
    _set_attribute(ctx, name, value)


def _kept(value: Any, array: type, left: Iterator[int], depth: int) -> Any:
    """Returns what is kept in the place of `value`: `value` itself, unless it has arrays that must be copied."""
    if isinstance(value, array):
        owner = value.base
        while isinstance(owner, array):
            owner = owner.base
        return value.copy() if isinstance(owner, torch.Tensor) and _is_of_an_engine(owner) else value
    if not isinstance(value, (list, tuple, dict)) or depth == 0 or len(value) > _MOST_VALUES:
        return value
    values = list(value.values() if isinstance(value, dict) else value)
    kept = [_kept(each, array, left, depth - 1) if next(left, None) is not None else each for each in values]
    if all(map(operator.is_, kept, values)):
        return value
    if isinstance(value, tuple):
        return value._make(kept) if hasattr(value, "_make") else tuple(kept)
    changed = copy.copy(value)
    if isinstance(changed, dict):
        changed.update(zip(value, kept))
    else:
        changed[:] = kept
    return changed


def _is_of_an_engine(tensor: torch.Tensor) -> bool:
    memory = tensor.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == memory for engine in closing for each in engine._parameters)


def copy_kept_arrays() -> None:
    """Replaces the function that sets attributes of contexts, for the whole process. Nothing in a context is copied but
    such arrays, and the containers that hold them."""
    BackwardCFunction.__setattr__ = _keep
