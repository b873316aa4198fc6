"""How a Python program joins its job, and how it leaves: the counterpart of tessera::run (include/tessera/run.h)."""

import atexit
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed

from tessera import _native
from tessera._error import Error

# Closed before the interpreter takes its modules apart, and told of forks.
closing: "weakref.WeakSet[Any]" = weakref.WeakSet()

_EXCEPTION_OF_THE_PROGRAM = 70
_failed = False
_leaves_at_exit = False


def read_strategy(strategy: str | os.PathLike | Mapping | None) -> _native.Strategy:
    """A strategy from a file's path or from a dict, with all its errors at once."""
    if strategy is None:
        strategy = {}
    if isinstance(strategy, Mapping):
        return _native.Strategy.from_json(json.dumps(strategy), "strategy")
    if isinstance(strategy, (str, os.PathLike)):
        return _native.Strategy.from_file(os.fspath(strategy))
    raise Error(f"a strategy is the path of a JSON file or a dict, got {type(strategy).__name__}")


# Tells both torch.distributed and Tessera that a store is served at MASTER_PORT already, so that they connect to it.
_STORE_IS_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
_store_of_torch: Any = None  # kept, so that destroy_process_group does not end a store that Tessera uses


def join(strategy: _native.Strategy) -> None:
    global _leaves_at_exit, _store_of_torch
    if not _native.is_joined():
        _store_of_torch = _store_at_master_port()
        if _store_of_torch is not None:
            os.environ[_STORE_IS_SERVED] = "True"
    _native.join(strategy)
    if "MASTER_PORT" in os.environ and world_size() > 1:
        os.environ[_STORE_IS_SERVED] = "True"  # torch.distributed may come later
    if not _leaves_at_exit:
        _leaves_at_exit = True
        atexit.register(_leave)
        os.register_at_fork(after_in_child=_after_fork)


def _store_at_master_port() -> Any:
    """The store of torch.distributed, if init_process_group had one served at the port where Tessera's ranks would meet."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    at_port = isinstance(store, distributed.TCPStore) and str(store.port) == os.environ.get("MASTER_PORT")
    return store if at_port else None


def init(strategy: str | os.PathLike | Mapping | None = None) -> None:
    """Joins this process to its job: reads the launcher's variables and meets the other ranks.

    Needed only where ranks are to talk before the first Engine, which does it otherwise. Of the strategy, "comm" and
    "memory" count here. Raises Error: 78 for variables that do not fit together, 69 for a port in use, 75 for ranks that do not come
    within comm.init_timeout_s.
    """
    join(read_strategy(strategy))


def rank() -> int:
    """This process's number among all ranks, from 0. Known without the other ranks."""
    return _native.rank()


def world_size() -> int:
    """How many ranks the job has. Known without the other ranks."""
    return _native.world_size()


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _native.local_rank()


def seed_for_rank(seed: int) -> int:
    """What this rank seeds its generator with for what must differ between ranks: dropout, augmentation."""
    return _native.seed_for_rank(seed)


def _leave() -> None:
    """At exit, as at the end of tessera::run: Engines go, and ranks leave together, while Python still runs."""
    if _native.is_forked():
        return
    if not hasattr(sys, "ps1") and getattr(sys, "last_type", None) is not None:  # another excepthook has taken our place
        _fail(sys.last_type, sys.last_value, sys.last_traceback)
    for engine in list(closing):
        engine.close()
    if not _failed:
        try:
            _native.leave()
        except Error as error:
            _fail(Error, error, error.__traceback__)
    _native.forget()


def _after_fork() -> None:
    for engine in list(closing):
        engine.enter_forked_process()


def _fail(kind, value, trace) -> None:
    """An exception ends this rank: tells the other ranks and the launcher, once, and sees to the exit code."""
    global _failed
    ours = issubclass(kind, Error)
    if _failed or _native.is_forked() or not (ours or _native.is_joined()):
        return
    _failed = True
    first_line = (str(value).splitlines() or [""])[0]
    text = str(value) if ours else f"{kind.__name__}: {first_line}"
    code = value.exit_code if ours else _EXCEPTION_OF_THE_PROGRAM
    code = _native.fail(code, text, "".join(traceback.format_exception(kind, value, trace)))
    if not issubclass(kind, KeyboardInterrupt):  # with which Python ends by the signal
        _native.set_exit_code(code)


def _after(previous: Callable[..., Any]) -> Callable[..., None]:
    """An excepthook that prints as the previous one did, and then tells."""

    def hook(kind, value, trace) -> None:
        previous(kind, value, trace)
        _fail(kind, value, trace)

    return hook


sys.excepthook = _after(sys.excepthook)
