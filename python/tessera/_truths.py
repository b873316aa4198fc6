"""Gets the rank of this process from sources other than the launcher's variables: torch.distributed's process group,
and MPI of mpi4py.

`said` and `meet` return the facts that these sources give. The native part compares these facts with the variables, and
decides which source is used (docs/start-python.md, "Who is who").
"""

import datetime
import itertools
import os
import socket
import sys
from typing import Any

from torch import distributed

from tessera._error import Error

_WRONG_VARIABLES, _PEER_LOST = 78, 75
_KEY = "tessera/hosts/{}"


def has_group() -> bool:
    """Returns whether torch.distributed has a process group."""
    return distributed.is_available() and distributed.is_initialized()


def said() -> dict[str, str]:
    """Returns the facts that torch.distributed and mpi4py give about this process. No other rank is needed for this."""
    words = {}
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        words |= {"MPI.COMM_WORLD.rank": mpi.COMM_WORLD.Get_rank(), "MPI.COMM_WORLD.size": mpi.COMM_WORLD.Get_size()}
    if has_group():
        words |= {"torch.distributed.get_rank()": distributed.get_rank(),
                  "torch.distributed.get_world_size()": distributed.get_world_size()}
    return {name: str(value) for name, value in words.items()}


def meet(timeout_s: float) -> tuple[dict[str, str], Any]:
    """Returns a pair. The first value is the dict of `said`, completed with the ranks of this host and the address of a
    store. The second value is an object that the caller must keep.

    The object must exist as long as ranks may still meet. The call is collective for a process group's ranks.
    """
    words = said()
    if not has_group() or distributed.get_world_size() == 1:
        return words, None
    store = distributed.distributed_c10d._get_default_store()
    try:
        hosts = _of_all_ranks(store, _this_host(), timeout_s)
        host, port, served = _meeting_place(store, len(set(hosts)) == 1, timeout_s)
    except distributed.DistNetworkError as error:
        raise Error(f"rank {distributed.get_rank()} of torch.distributed's process group met the others in tessera.init, and the process that "
                    f"serves their store is gone: {error}. [T1062] hint: what that process (rank 0, in most cases) printed last, or its launcher, says why "
                    "it ended", _PEER_LOST) from error
    except RuntimeError as error:  # torch.distributed's store raises this
        of_file = isinstance(_base_of(store), distributed.FileStore)
        where = ", at a store in a file, which does not tell that a rank has ended" if of_file else ""
        raise Error(f"rank {distributed.get_rank()} of torch.distributed's process group waited for the others in tessera.init{where}: {error}. "
                    "[T0667] hint: all ranks of the process group make an Engine", _PEER_LOST) from error
    local_rank, sizes = _place_on_host(hosts)
    words |= {"this process among its host's": str(local_rank), "ranks on its host": str(hosts.count(hosts[distributed.get_rank()]))}
    if len(set(sizes)) > 1:
        words["ranks of each host of torch.distributed"] = ",".join(map(str, sizes))
    if port:
        words |= {"host of torch.distributed's store": host, "port of torch.distributed's store": port}
    return words, served


def _of_all_ranks(store: Any, value: str, timeout_s: float) -> list[str]:
    store.set(_KEY.format(distributed.get_rank()), value)
    keys = [_KEY.format(rank) for rank in range(distributed.get_world_size())]
    store.wait(keys, datetime.timedelta(seconds=timeout_s))
    return [store.get(key).decode() for key in keys]


def _this_host() -> str:
    """Returns a text that is equal in processes that can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return socket.gethostname()


def _place_on_host(hosts: list[str]) -> tuple[int, list[int]]:
    """Returns (local rank, ranks on each host)."""
    groups = [list(ranks) for _, ranks in itertools.groupby(range(len(hosts)), key=hosts.__getitem__)]
    if len(groups) != len(set(hosts)):
        raise Error("torch.distributed's process group numbers its ranks in another order than host by host. "
                    "[T0668] hint: give init_process_group the ranks of one host after those of the other", _WRONG_VARIABLES)
    own = next(ranks for ranks in groups if distributed.get_rank() in ranks)
    return own.index(distributed.get_rank()), [len(ranks) for ranks in groups]


def _base_of(store: Any) -> Any:
    """Returns the store inside all PrefixStores."""
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store


def _meeting_place(store: Any, on_one_host: bool, timeout_s: float) -> tuple[str, str, Any]:
    """Returns (host, port, server) of the group's store if that store has a port. Otherwise rank 0 starts a store with
    a port, and every rank returns the values of that store.

    If MASTER_PORT names the port of a store, none is started, and the values are empty.
    """
    base = _base_of(store)
    if isinstance(base, distributed.TCPStore):
        return base.host, str(base.port), base
    if "MASTER_PORT" in os.environ:
        return "", "", None
    server = None
    if distributed.get_rank() == 0:
        host = "127.0.0.1" if on_one_host else os.environ.get("MASTER_ADDR", socket.gethostname())
        listener = socket.create_server(("127.0.0.1" if on_one_host else "", 0))
        server = distributed.TCPStore(host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
                                      master_listen_fd=listener.detach())
        store.set(_KEY.format("port"), f"{host} {server.port}")
    store.wait([_KEY.format("port")], datetime.timedelta(seconds=timeout_s))
    host, port = store.get(_KEY.format("port")).decode().split()
    return host, port, server


def expect_unchanged(joined: tuple[int, int], launcher: str) -> None:
    """Raises Error (78) if a process group has other ranks than the job that this process had joined earlier."""
    if not has_group():
        return
    group = distributed.get_rank(), distributed.get_world_size()
    if group != joined:
        alone = " (started alone)" if launcher == "single" else f" ({launcher})"
        raise Error(f"torch.distributed's process group has this process as rank {group[0]} of {group[1]}, but Tessera joined its job before "
                    f"as rank {joined[0]} of {joined[1]}{alone}, and trains so. [T0669] hint: call init_process_group before tessera.init, "
                    "tessera.rank and the first Engine, or start the ranks with `tessera launch` or torchrun", _WRONG_VARIABLES)
