"""Lets a Python program join its job and leave it: the counterpart of tessera::run (include/tessera/run.h)."""

import atexit
import json
import opcode
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import process, util
from typing import Any

from tessera import _native, _outside, _truths
from tessera._error import Error

# All Engines and DataParallels. They are closed before the interpreter removes its modules.
closing: "weakref.WeakSet[Any]" = weakref.WeakSet()
# All Engines. Their enter_forked_process is called in a process that was forked from this process.
engines: "weakref.WeakSet[Any]" = weakref.WeakSet()

_EXCEPTION_OF_THE_PROGRAM = 70
_SECONDS_TO_MEET = 300.0
_failed = False
_leaves_at_exit = False


def read_strategy(strategy: str | os.PathLike | Mapping | None) -> _native.Strategy:
    """Returns the strategy of a file or a dict. Raises Error: 78 with everything that is wrong in the strategy; 66 if
    the file is missing, 77 if it may not be read.
    """
    if strategy is None:
        strategy = {}
    if isinstance(strategy, Mapping):
        return _native.Strategy.from_json(json.dumps(plain_values(strategy)), "strategy")
    if isinstance(strategy, (str, os.PathLike)):
        return _native.Strategy.from_file(os.fspath(strategy))
    raise Error(f"a strategy of type {type(strategy).__name__} was given. [T0654] hint: it is a dict, or the path of a JSON file")


def plain_values(value: Any, pointer: str = "") -> Any:
    """Returns a strategy, or a value in it, in the types of JSON: numbers of numpy and torch become Python's numbers,
    and paths become texts. Raises Error (78), which names the key, if a value has another type.
    """
    if isinstance(value, Mapping):
        return {str(key): plain_values(each, f"{pointer}/{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(each, f"{pointer}/{index}") for index, each in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):  # bool is an int
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain_values(value.tolist(), pointer)
    raise Error(f"{pointer or 'the strategy'}: a value of type {type(value).__name__} was given. [T0955] hint: write a number, a text, true "
                "or false, a list or a dict, as in a JSON file", 78)


# This variable tells torch.distributed and Tessera that a store already runs at MASTER_PORT, so that they connect to
# it.
_STORE_IS_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
_store_of_torch: Any = None  # a store that Tessera uses; this keeps the store alive after destroy_process_group
_told: tuple[int, int] | None = None  # rank and world size that the program got before this process joined its job


def join(strategy: _native.Strategy) -> None:
    if not _native.is_joined():
        return _join(strategy)
    expect_one_truth()
    _native.join(strategy, {})  # raises an Error in a forked process


def _join(strategy: _native.Strategy) -> None:
    global _leaves_at_exit, _store_of_torch
    words, _store_of_torch = _truths.meet(json.loads(strategy.to_json())["comm"]["init_timeout_s"])
    if _store_of_torch is not None and str(_store_of_torch.port) == os.environ.get("MASTER_PORT"):
        os.environ[_STORE_IS_SERVED] = "True"
    _expect_told((_native.rank(words), _native.world_size(words)))
    _native.join(strategy, words)
    _outside.begin()
    # torch.distributed may be initialised later. It then uses the store at MASTER_PORT.
    if "MASTER_PORT" in os.environ and _native.world_size({}) > 1 and _native.launcher({}) != "torch.distributed":
        os.environ[_STORE_IS_SERVED] = "True"
    if not _leaves_at_exit:
        _leaves_at_exit = True
        if process.parent_process() is None:
            atexit.register(_leave)
        else:  # multiprocessing ends a forked process without atexit, and hides an exception at the end of any process
            util.Finalize(None, _leave_child, exitpriority=1)
        os.register_at_fork(after_in_child=_after_fork)


def expect_one_truth() -> None:
    """Raises Error (78) if torch.distributed now gives this process another rank or world size than the job that the
    process joined."""
    if _truths.has_group() and _native.is_joined() and not _native.is_forked():
        _truths.expect_unchanged((_native.rank({}), _native.world_size({})), _native.launcher({}))


def _expect_told(now: tuple[int, int]) -> None:
    if _told not in (None, now):
        raise Error(f"tessera told this program that it is rank {_told[0]} of {_told[1]}, and torch.distributed's process group makes it rank "
                    f"{now[0]} of {now[1]}. [T0655] hint: call init_process_group before tessera.rank and tessera.world_size", 78)


def _who() -> tuple[int, int]:
    """Returns (rank, world size), and stores this result."""
    global _told
    words = {} if _native.is_joined() else _truths.said()
    now = _native.rank(words), _native.world_size(words)
    if not _native.is_joined():
        _expect_told(now)
        _told = now
    return now


def init(strategy: str | os.PathLike | Mapping | None = None) -> None:
    """Joins this process to its job: reads the launcher's variables and meets the other ranks.

    A program needs this call only if ranks communicate before the first Engine is made. Otherwise the Engine joins the
    job. This call uses the strategy's "comm" and "memory". If a process group of torch.distributed exists already, it
    is compared with the launcher's variables. If there are no such variables, the job has the ranks of that group
    (docs/start-python.md, "Who is who"). Raises Error: 78 if variables do not fit together or do not fit the process
    group, 69 if a port is in use, 75 if ranks do not join within comm.init_timeout_s.
    """
    join(read_strategy(strategy))


def rank() -> int:
    """Returns this process's number among all ranks, from 0. It does not need the other ranks."""
    return _who()[0]


def world_size() -> int:
    """Returns the number of ranks in the job. It does not need the other ranks."""
    return _who()[1]


def local_rank() -> int:
    """Returns this process's number among the ranks of its host, from 0.

    If only torch.distributed has the numbers of the ranks, this call waits until the other ranks also make this call,
    or join the job.
    """
    _who()
    return _native.local_rank({} if _native.is_joined() else _truths.meet(_SECONDS_TO_MEET)[0])


def seed_for_rank(seed: int) -> int:
    """Returns the seed of this rank's generator, for everything that must differ between ranks: dropout, augmentation.
    """
    return _native.seed_for_rank(seed, rank())


def _leave() -> None:
    """Runs at exit. It does what tessera::run does after its body."""
    if not hasattr(sys, "ps1") and getattr(sys, "last_type", None) is not None:  # another excepthook has replaced ours
        _fail(sys.last_type, sys.last_value, sys.last_traceback)
    _leave_with(_status_of_exit())


def _leave_with(status: Any) -> None:
    """Closes Engines and DataParallels, and lets ranks leave together, while Python is still running. `status` is the
    code of the SystemExit that ends the program; None if it ends in another way.
    """
    if _native.is_forked():
        return
    if _failed or status == 0:
        status = None
    if status is not None:
        _native.end(status if isinstance(status, int) else 1, f"the program ended itself by SystemExit({status!r:.200})")
    for engine in list(closing):
        engine.close()
    _outside.end()
    if not _failed and status is None:
        try:
            _native.leave()
        except Error as error:
            _fail(Error, error, error.__traceback__)
    _native.forget()


def _leave_child() -> None:
    """Runs at the end of a process of multiprocessing, while an exception may still be propagating."""
    kind, value, trace = sys.exc_info()
    # torch.multiprocessing raises SystemExit in place of the program's exception.
    if kind is SystemExit and value.code and value.__context__ is not None:
        value = value.__context__
        kind, trace = type(value), value.__traceback__
    is_exit = kind is not None and issubclass(kind, SystemExit)
    if kind is not None and not is_exit:
        _fail(kind, value, trace)
    _leave_with(value.code if is_exit else None)


def _forget_told() -> None:
    global _told
    _told = None


def _after_fork() -> None:
    for engine in list(engines):
        engine.enter_forked_process()


def _fail(kind, value, trace) -> None:
    """Ends this rank because of an exception: tells the other ranks and the launcher, once, and sets the exit code."""
    global _failed
    ours = issubclass(kind, Error)
    if _failed or _native.is_forked() or not (ours or _native.is_joined()):
        return
    _failed = True
    first_line = (str(value).splitlines() or [""])[0]
    text = str(value) if ours else f"{kind.__name__}: {first_line}"
    code = value.exit_code if ours else _EXCEPTION_OF_THE_PROGRAM
    code = _native.fail(code, text, "".join(traceback.format_exception(kind, value, trace)))
    if not issubclass(kind, KeyboardInterrupt):  # Python then ends with the signal SIGINT
        _native.set_exit_code(code)


_exit_of_python = sys.exit
_exit_noted: tuple[Any, Any] | None = None  # the code of the latest SystemExit, and the program's outermost frame


def _note_exit(code: Any) -> None:
    """Stores the exit code for _leave, because excepthooks are not called for SystemExit."""
    global _exit_noted
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if threading.current_thread() is threading.main_thread():
        _exit_noted = code, frame


def _exit(status: Any = None, /) -> None:
    """Replaces sys.exit. Before Python 3.12, sys.exit may end a program without making a SystemExit."""
    _note_exit(status)
    _exit_of_python(status)


def _status_of_exit() -> Any:
    """Returns the code of the SystemExit that ends this program; None if no SystemExit was made, or the program has
    caught the latest one. If it was caught, the program's outermost frame has returned.
    """
    if _exit_noted is None:
        return None
    status, frame = _exit_noted
    returned = opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
    return None if returned else status


sys.exit = _exit
_native.note_exits(_note_exit)


def _after(previous: Callable[..., Any]) -> Callable[..., None]:
    """Returns an excepthook that prints as the previous excepthook did, and then calls _fail."""

    def hook(kind, value, trace) -> None:
        previous(kind, value, trace)
        _fail(kind, value, trace)

    return hook


sys.excepthook = _after(sys.excepthook)
os.register_at_fork(after_in_child=_forget_told)
