"""Starts ranks by forking this process, which has imported torch and tessera. An import takes longer than a small
program.

No launcher watches the ranks. The ranks find each other as they do under torchrun.

Usage: forked.py MODULE[,MODULE...] RANKS PROGRAM [ARGUMENT...] [then RANKS PROGRAM [ARGUMENT...]]...

This program imports the modules. Then it runs the named programs one after the other on forked ranks, each as Python
runs a file. 0 ranks means one process that no launcher has started. This program ends with the first exit code that is
not 0. """

import importlib
import itertools
import os
import runpy
import signal
import sys
import tempfile
import traceback

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # finds GPUs and does not start CUDA, so forks can use it

import torch  # noqa: E402, F401
from free_port import free_port  # noqa: E402
import tessera  # noqa: E402, F401


def _variables(rank, ranks, port):
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _child(rank, ranks, port, output, program):
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(_variables(rank, ranks, port))
    try:
        program()
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 1))
    sys.stdout.flush()
    os._exit(0)


def run_forked(ranks, program):
    """Returns ([exit code or -signal of each rank], output of all ranks)."""
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


_kept = []  # the objects of a file live until Python ends, as if Python had been started with this file


def _run_as_main(program, arguments):
    """Runs a file in this forked process. The process then ends as any Python process does."""
    sys.argv = [program, *arguments]
    _kept.append(runpy.run_path(program, run_name="__main__"))
    raise SystemExit(0)


def _run_files(ranks, program, *arguments):
    """Runs a file on `ranks` ranks, and returns the first exit code that is not 0, or 0. If a rank fails, the other
    ranks are ended."""
    port = free_port()
    sys.stdout.flush()
    left, first = [], 0
    of_job = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": f"forked-{port}", "TORCHELASTIC_RESTART_COUNT": "0",
              "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}  # as `tessera launch` and torchrun set them
    for rank in range(ranks or 1):
        pid = os.fork()
        if pid == 0:
            os.environ.update(_variables(rank, ranks, port) | of_job if ranks else {})
            _run_as_main(program, arguments)
        left.append(pid)
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if (code := os.waitstatus_to_exitcode(status)) and not first:
            first = code if code > 0 else 128 - code
            for other in left:
                os.kill(other, signal.SIGKILL)  # Lightning's own handler of SIGTERM would only set a flag
    return first


def main():
    modules, *words = sys.argv[1:]
    for module in modules.split(","):
        importlib.import_module(module)
    for is_end, run in itertools.groupby(words, lambda word: word == "then"):
        if is_end:
            continue
        ranks, program, *arguments = run
        if code := _run_files(int(ranks), program, *arguments):
            return code
    return 0


if __name__ == "__main__":
    os._exit(main())
