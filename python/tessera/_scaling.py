"""What a share of time in communication makes of many ranks, by Gustafson's law ("Reevaluating Amdahl's law", 1988)."""

from tessera import _native
from tessera._error import Error
from tessera._job import world_size


def scaled_speedup(share: float, ranks: int | None = None) -> float:
    """By which factor `ranks` ranks (None: this job's) get through more work a second than one that does not communicate, where each
    communicates for `share` of its time: ranks - share (ranks - 1). StepResult.communication_share is such a share."""
    return _native.scaled_speedup(share, _count(ranks))


def scaling_efficiency(share: float, ranks: int | None = None) -> float:
    """The speed-up a rank: 1 where nobody communicates, 1 / ranks where ranks do nothing else."""
    return _native.scaling_efficiency(share, _count(ranks))


def _count(ranks: int | None) -> int:
    if ranks is None:
        return world_size()
    if ranks < 1:
        raise Error(f"a scaled speed-up wants 1 rank or more, got {ranks}. [T0760] hint: leave ranks out for this job's")
    return ranks
