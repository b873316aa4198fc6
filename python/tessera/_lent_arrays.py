"""Gives copies of a sharded parameter to code that runs inside an operator and could keep the parameter's memory."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import dlpack

from tessera import _native
from tessera._job import closing


def _of_a_copy(export: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that exports a tensor's memory as `export` does, but exports a copy if the memory is lent.

    An operator keeps its parameters in memory until it returns, and then another unit may get the memory. Code of the
    program may run meanwhile: an autograd function, an operator, or a dispatch mode. Such code may keep the exported
    memory in any place: a context, a list, a global, or a tensor that is saved for backward.
    """
    @functools.wraps(export)
    def exported(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if closing and _native.is_lent(tensor):
            tensor = tensor.clone()
            if tensor.is_cuda:  # another stream may read the exported copy
                torch.cuda.current_stream(tensor.device).synchronize()
        return export(tensor, *args, **options)

    return exported


_numpy = _of_a_copy(torch.Tensor.numpy)
_to_dlpack = {name: _of_a_copy(getattr(torch._C, name)) for name in ("_to_dlpack", "_to_dlpack_versioned")}


def copy_lent_arrays() -> None:
    """Replaces the functions that export the memory of tensors, for the whole process. `__array__` and `__dlpack__`
    call them. Tensors that are not lent are exported as before."""
    torch.Tensor.numpy = _numpy
    for name, export in _to_dlpack.items():
        setattr(torch._C, name, export)
    dlpack.to_dlpack = torch.to_dlpack = _to_dlpack["_to_dlpack"]
