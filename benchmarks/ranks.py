"""Starts the ranks of one contender, and makes sure that no rank outlives this program. It uses the standard library
only."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

_LINES_OF_ERROR = 15


def _command_of(arguments):
    """Returns the command in a form for readers on other machines: files are shown by their names, without folders."""
    return " ".join(os.path.basename(each) if os.path.isabs(each) else each for each in map(str, arguments))


class ContenderFailed(Exception):
    """Says that a rank ended with an error, or not in time. The message has the command and the end of its output."""


def free_port():
    """Returns a TCP port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environments(ranks):
    """Returns the variables that torchrun sets, for each of `ranks` ranks of this machine. OMP_NUM_THREADS is
    not among them, since `start` sets it."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run_ranks(command, environments, timeout_s, watch=None):
    """Runs `command` once for each of `environments`, all at the same time. Returns the standard output of each.

    `watch(pids)` is a context manager that is open while they run. `{rank}` in an argument is replaced by the index in
    `environments`. Raises ContenderFailed when a rank fails or the time is over. The other ranks are then ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        processes = []
        try:
            for number, environment in enumerate(environments):
                processes.append(start(command, number, environment, folder))
            if watch is None:
                _wait(processes, folder, timeout_s)
            else:
                with watch([process.pid for process in processes]):
                    _wait(processes, folder, timeout_s)
        finally:
            end(processes)
        return [(folder / f"{number}.out").read_text() for number in range(len(environments))]


def start(command, number, environment, folder):
    """Starts rank `number` as the leader of its own session, and returns the process. The output is written to files in
    `folder`."""
    arguments = [str(argument).replace("{rank}", str(number)) for argument in command]
    with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
        return subprocess.Popen(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, stdout=out,
                                stderr=err, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait(processes, folder, timeout_s):
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(processes))
    while running:
        for number, process in list(running.items()):
            if process.poll() is None:
                continue
            if process.returncode != 0:
                raise ended(process, number, folder)
            del running[number]
        if running and time.monotonic() > deadline:
            number, process = next(iter(running.items()))
            raise ContenderFailed(f"rank {number} of {' '.join(process.args)} was not done after {timeout_s} s:\n"
                                  + _last_lines(folder / f"{number}.err"))
        time.sleep(0.02)


def ended(process, number, folder):
    """Returns the error of a rank that has ended too early."""
    return ContenderFailed(f"rank {number} of {_command_of(process.args)} ended with {process.returncode}:\n"
                           + _last_lines(folder / f"{number}.err"))


def let_signals_end_ranks():
    """Makes SIGTERM and SIGHUP raise SystemExit in this program, so that the code that ends its ranks and removes its
    hosts still runs. A program calls it once."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))


def end(processes):
    """Ends the processes that still run."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(path):
    return "\n".join(path.read_text(errors="replace").splitlines()[-_LINES_OF_ERROR:])
