"""Reports calls of torch.distributed in which this rank waits. The report goes to the watch, which finds ranks that
wait for each other (runtime/comm/call_watch.h).

The watch has only Tessera's own calls. Without this report, a rank in torch.distributed.barrier() would look like a
rank that computes, while other ranks wait for it in a call of an Engine. A thread therefore checks twice a second which
functions Python's threads run. This thread makes no collective calls itself. If a thread has been in a call of
torch.distributed for 3 s, or this rank has waited that long in a call of Tessera, the watching thread reads torch's
flight recorder. The recorder has the calls of each process group: their numbers, the threads that made them, and
whether they are finished.

Three kinds of waits are not found, and look like computation: a call with async_op=True (`work.wait()`), point-to-point
calls, and backends without the recorder.
"""

import json
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

from tessera import _native

_SECONDS_BETWEEN_LOOKS, _LONG_SECONDS = 0.5, 3.0
_MOST_TOLD = 8  # number of a group's latest calls that are reported

# A group has these fields: its name; its ranks as first, count and stride; the number of calls that were begun; its
# threads; and the texts of its latest calls by their numbers.
_Group = tuple[str, int, int, int, int, list[int], dict[int, str]]
_Wait = tuple[str, int, int, str]  # group, call, thread, text

_watch: "_Watch | None" = None


def begin() -> None:
    """Starts the watch if this process has joined a job of several ranks and torch has the recorder. A program may make
    its process group later, and wait in it before it calls Tessera again.
    """
    global _watch
    if _watch is None and _native.world_size({}) > 1 and _recorder() is not None:
        _watch = _Watch()
        _watch.start()


def end() -> None:
    """Stops the watch. It runs before this process leaves its job."""
    if _watch is not None:
        _watch.ends.set()
        _watch.join()


def _recorder() -> Any:
    return getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)


class _Watch(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="tessera: calls of torch.distributed", daemon=True)
        self.ends = threading.Event()
        self._maker = threading.get_ident()  # thread assumed to make the calls of groups that have no call yet
        self._file = distributed.distributed_c10d.__file__
        self._stays: dict[int, tuple[Any, float]] = {}  # for each thread: its position in a call, and when it got there
        self._has_told = False

    def run(self) -> None:
        while not self.ends.wait(_SECONDS_BETWEEN_LOOKS):
            if distributed.is_initialized() or self._has_told:
                self._look()

    def _look(self) -> None:
        now, stays = time.monotonic(), {}
        for thread, frame in sys._current_frames().items():
            if frame.f_code.co_filename == self._file:
                place = id(frame), frame.f_lasti
                before, since = self._stays.get(thread, (None, now))
                stays[thread] = place, since if place == before else now
        self._stays = stays
        stuck = {thread for thread, (_, since) in stays.items() if now - since >= _LONG_SECONDS}
        if stuck or _native.waits_long():
            _native.tell_outside(*_calls(stuck, self._maker))
            self._has_told = True
        elif self._has_told:
            _native.tell_outside([], [])
            self._has_told = False


def _calls(stuck: Iterable[int], maker: int) -> tuple[list[_Group], list[_Wait]]:
    """Returns this rank's progress in each process group, and the calls in which the threads `stuck` wait."""
    try:
        entries = [entry for entry in json.loads(_recorder()()).get("entries", []) if not entry["is_p2p"]]
        # The recorder has one list of the latest calls of all groups.
        has_all = not entries or entries[0]["record_id"] == 0
        names = dict(distributed.distributed_c10d._world.pg_names)
        groups, waits = [], []
        for group, name in names.items():
            calls = [entry for entry in entries if entry["process_group"][0] == name]
            ranks = _progression(distributed.get_process_group_ranks(group))
            if ranks is None or not (calls or has_all):
                continue
            latest = {entry["collective_seq_id"]: _text(entry, name) for entry in calls[-_MOST_TOLD:]}
            threads = {int(entry["thread_id"]) for entry in calls} or {maker}
            groups.append((_name(name), *ranks, max(latest, default=0), sorted(threads), latest))
        for thread in stuck:
            own = [entry for entry in entries if int(entry["thread_id"]) == thread]
            if own and not own[-1]["retired"] and time.time() - own[-1]["time_created_ns"] / 1e9 >= _LONG_SECONDS:
                name = own[-1]["process_group"][0]
                waits.append((_name(name), own[-1]["collective_seq_id"], thread, _text(own[-1], name)))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
        # The recorder has another version, or a group is ending.
        return [], []
    known = {group[0] for group in groups}
    return groups, [wait for wait in waits if wait[0] in known]


def _name(group: str) -> str:
    return f"torch.distributed/{group}"


def _text(entry: dict[str, Any], group: str) -> str:
    """Returns a text such as "barrier of torch.distributed (#4)"."""
    operation = entry["profiling_name"].split(":")[-1]
    of_group = "" if entry["process_group"][1] == "default_pg" else f"'s group {group}"
    return f"{operation} of torch.distributed{of_group} (#{entry['collective_seq_id']})"


def _progression(ranks: list[int]) -> tuple[int, int, int] | None:
    """Returns (first, count, stride) if the ranks form an arithmetic progression, else None."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = all(b - a == stride for a, b in zip(ranks, ranks[1:]))
    return (ranks[0], len(ranks), stride) if even and stride > 0 else None
