"""Answers torch's profilers, which ask parameters for their memory.

The answer must not raise an exception: with_stack asks at a place where an exception would end the process.
"""

from collections.abc import Callable

from torch.autograd import profiler

from tessera import _native


def _telling(run: Callable[[], None], begins: bool) -> Callable[[], None]:
    def tell() -> None:
        _native.observe_pointers(begins)
        run()

    return tell


def answer_profilers() -> None:
    """Makes sharded parameters answer while a profiler of torch runs, for the whole process.

    A parameter that no operator and no guard is reading then returns memory full of NaN instead of raising an
    exception.
    """
    profiler._run_on_profiler_start = _telling(profiler._run_on_profiler_start, True)
    profiler._run_on_profiler_stop = _telling(profiler._run_on_profiler_stop, False)
