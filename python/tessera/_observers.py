"""Answers torch's profilers, which ask parameters for their memory.

The answer must not raise an exception: with_stack asks at a place where an exception would end the process, and the
observer of execution traces prints each exception.
"""

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler
from torch.profiler import ExecutionTraceObserver

from tessera import _native


def _telling(run: Callable[[], None], begins: bool) -> Callable[[], None]:
    def tell() -> None:
        _native.observe_pointers(begins)
        run()

    return tell


def _telling_of_change(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a method that calls `run`, which may start or stop an ExecutionTraceObserver, and tells C++ if it did."""
    def tell(observer: Any) -> None:
        was_running = observer.is_running()
        run(observer)
        if observer.is_running() != was_running:
            _native.observe_pointers(not was_running)

    return tell


def answer_profilers() -> None:
    """Makes sharded parameters answer while a profiler of torch runs, for the whole process.

    A parameter that no operator and no guard is reading then returns memory full of NaN instead of raising an
    exception.
    """
    profiler._run_on_profiler_start = _telling(profiler._run_on_profiler_start, True)
    profiler._run_on_profiler_stop = _telling(profiler._run_on_profiler_stop, False)
    ExecutionTraceObserver.start = _telling_of_change(ExecutionTraceObserver.start)
    ExecutionTraceObserver.stop = _telling_of_change(ExecutionTraceObserver.stop)
