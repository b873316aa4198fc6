"""Ranks that are forked from this process, which has imported torch and tessera: an import takes longer than a small program.

No launcher watches them. The ranks meet as they do under torchrun.
"""

import os
import sys
import tempfile
import traceback

import torch  # noqa: F401
from free_port import free_port
import tessera  # noqa: F401


def _child(rank, ranks, port, output, program):
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        program()
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 1))
    sys.stdout.flush()
    os._exit(0)


def run_forked(ranks, program):
    """Returns ([exit code or -signal of each rank], what all of them wrote)."""
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as output:
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _child(rank, ranks, port, output.fileno(), program)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        output.seek(0)
        return codes, output.read().decode(errors="replace")
