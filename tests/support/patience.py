"""Limits of time for tests, like those of tests/support/limits/patience.h for C++.

A test states how many seconds something takes at most on a machine at rest. The limit grows as much as the time of a
reference piece of work, which is measured once in the same run. Two processes start and compute in this work. The limit
is never below the seconds that the test states.
"""

import functools
import subprocess
import sys
import time

REFERENCE_AT_REST = 0.07  # seconds that the reference took on two cores at rest
_WORK = "x = 1\nfor _ in range(150_000): x = x * 6364136223846793005 % (1 << 64) + 1"


def measure_reference():
    """Returns the seconds that the reference piece of work takes now."""
    begin = time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", _WORK]) for _ in range(2)]
    for process in processes:
        process.wait()
    return time.monotonic() - begin


@functools.cache
def slowness():
    """Returns how many times longer things take than on an idle machine, which is at least 1."""
    return max(1.0, measure_reference() / REFERENCE_AT_REST)


def patient(at_rest):
    """Returns the limit, in seconds, for a piece of work that takes `at_rest` seconds on a machine at rest."""
    return at_rest * slowness()


def in_time(seconds, at_rest):
    """Returns whether work that took `seconds` was done in time. If the work took longer than `at_rest`, the function
    measures the reference again."""
    return seconds <= at_rest or seconds <= at_rest * max(slowness(), measure_reference() / REFERENCE_AT_REST)
