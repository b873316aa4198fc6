"""Lets autograd functions of Python keep arrays of a sharded parameter for their backward."""

import sys
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from tessera._job import closing

_set_attribute = BackwardCFunction.__setattr__


def _keep(ctx: BackwardCFunction, name: str, value: Any) -> None:
    """Sets an attribute of the context, as in `ctx.scale = scale.numpy()`. If `value` is an array over the memory of an
    Engine's parameter, a copy is kept. After forward another unit may get this memory.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        owner = value.base
        while isinstance(owner, numpy.ndarray):
            owner = owner.base
        if isinstance(owner, torch.Tensor) and _is_of_an_engine(owner):
            value = value.copy()
    _set_attribute(ctx, name, value)


def _is_of_an_engine(tensor: torch.Tensor) -> bool:
    memory = tensor.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == memory for engine in closing for each in engine._parameters)


def copy_kept_arrays() -> None:
    """Replaces the function that sets attributes of contexts, for the whole process. Nothing in a context is copied but
    such arrays."""
    BackwardCFunction.__setattr__ = _keep
