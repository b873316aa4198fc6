"""Defines groups of an optimizer's parameters. If an Engine cannot use a value that is written into a group, the line
that writes the value raises an Error."""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from tessera._error import Error

# Keys of torch.optim that choose how a step is computed, and do not change its result.
_HOW = {"foreach", "fused", "capturable"}


class WatchedGroup(dict):
    """A group of `optimizer.param_groups`. Copies and pickles of it are plain dictionaries.

    An optimizer's step reads only the keys of its `defaults`. All other keys belong to schedulers and programs,
    whatever their names are (initial_lr, max_lr, swa_lr, base_momentum, lr_scale ...), and may be written. The
    optimizer's own keys in `carried` reach the Engine with the next step. All other keys of the optimizer must stay as
    they are.
    """

    def __init__(self, group: dict[str, Any], defaults: Iterable[str], carried: Iterable[str], who: str) -> None:
        super().__init__(group)
        self._fixed, self._who = set(defaults) - set(carried) - _HOW, who

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._fixed and value != self.get(key):
            raise Error(f"{_writer()} sets {key}={value!r} in a group of {self._who}, which the Engine cannot follow: it trains "
                        f"with {key}={self.get(key)!r}. [T0717] hint: leave it as it was when training began")
        super().__setitem__(key, value)

    def update(self, *given: Any, **more: Any) -> None:
        for key, value in dict(*given, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> "WatchedGroup":
        self.update(other)
        return self

    def __reduce__(self):
        return dict, (dict(self),)


def watch(optimizer: torch.optim.Optimizer, defaults: Iterable[str], carried: Iterable[str], who: str) -> None:
    """Makes all groups WatchedGroups. Call it again after groups may have been added: add_param_group,
    load_state_dict."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        if type(group) is not WatchedGroup:
            groups[index] = WatchedGroup(group, defaults, carried, who)


def plain(value: Any) -> Any:
    """Returns a number of a group in a form that `Engine.set_option` takes and that can be compared: schedulers may
    write tensors.
    """
    return tuple(float(each) for each in value) if isinstance(value, (tuple, list)) else float(value)


def _writer() -> str:
    """Returns the name of the function that wrote a value: "OneCycleLR.get_lr", "Classifier.training_step"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return name if owner is None else f"{type(owner).__name__}.{name}"
