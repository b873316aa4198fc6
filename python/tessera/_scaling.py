"""Computes the gain of many ranks if each of them communicates for a share of its time, by Gustafson's law
("Reevaluating Amdahl's law", 1988)."""

from tessera import _native
from tessera._error import Error
from tessera._job import world_size


def scaled_speedup(share: float, ranks: int | None = None) -> float:
    """Returns the speed-up of `ranks` ranks (None: those of this job): how many times as much work they do per second
    as one rank that does not communicate. Each rank communicates for `share` of its time. The result is
    ranks - share * (ranks - 1). StepResult.communication_share is such a share."""
    return _native.scaled_speedup(share, _count(ranks))


def scaling_efficiency(share: float, ranks: int | None = None) -> float:
    """Returns the speed-up for each rank: 1 if no rank communicates, 1 / ranks if ranks only communicate."""
    return _native.scaling_efficiency(share, _count(ranks))


def _count(ranks: int | None) -> int:
    if ranks is None:
        return world_size()
    if ranks < 1:
        raise Error(f"a scaled speed-up wants 1 rank or more, got {ranks}. [T0760] hint: leave ranks out for this job's")
    return ranks
