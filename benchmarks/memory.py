"""Measures how much memory a process uses, and computes with a formula how much its strategy needs.

The peak of a rank is the largest *anonymous + shared* memory seen while it trains, minus the memory of the same program
with a tiny model. Anonymous memory belongs to one process. If several ranks map the same memory, each rank counts its
share of it (PSS, the "proportional set size" of proc_pid_smaps(5)). The ranks' numbers therefore add up to the memory
that they take from the machine. Pages of files, such as the libraries' code, do not count, since they can be dropped.
The kernel walks all pages for this, so memory is measured in a separate run and never in a run that is timed.
"""

import pathlib
import threading

SAMPLE_SECONDS = 0.01
_COUNTED = ("Pss_Anon", "Pss_Shmem")


def used_bytes(pid="self"):
    """Returns anonymous memory plus this process's share of shared memory. Raises OSError if the process has ended."""
    total = 0
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _COUNTED:
            total += int(rest.split()[0]) * 1024
    return total


class PeakSampler:
    """Samples `measure()` (a number, or None for "not now") on its own thread while the context is open.

    `peak` is the largest value so far, and 0 before the first value. It does not change after the context has closed.
    The context takes one more sample when it closes, so `peak` is never below the memory in use at the end.
    """

    def __init__(self, measure=used_bytes, seconds=SAMPLE_SECONDS):
        self.peak = 0
        self._measure = measure
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self):
        while not self._stop.is_set():
            self._sample()
            self._stop.wait(self._seconds)

    def _sample(self):
        value = self._measure()
        if value is not None:
            self.peak = max(self.peak, value)


def formula_bytes(stage, parameters, ranks, dtype):
    """Returns the bytes that a rank needs for parameters, gradients and AdamW's state under ZeRO (arXiv 1910.02054,
    figure 1).

    With P bf16 parameters over N ranks, stages 0 to 3 need 16P, 4P + 12P/N, 2P + 14P/N and 16P/N bytes. (There are 2
    bytes each for the parameter and its gradient, and 12 for the fp32 master and two moments.) There is no second copy
    of fp32 parameters, so each needs 4 + 4 + 8 bytes. Activations do not count.
    """
    parameter, gradient, state = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}[dtype]
    sharded = {0: 0, 1: state, 2: state + gradient, 3: state + gradient + parameter}[stage]
    return (parameter + gradient + state - sharded) * parameters + sharded * parameters / ranks
