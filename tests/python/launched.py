"""Starts Python programs on several ranks, as a user does."""

import concurrent.futures
import contextlib
import os
import pathlib
import secrets
import subprocess
import sys
import textwrap
import time
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent
RANKS = FOLDER / "ranks"  # the programs that every rank runs
SUPPORT = FOLDER.parent / "support"
sys.path.append(str(SUPPORT))
from patience import patient  # noqa: E402

TESSERA = os.environ.get("TESSERA_BIN", "tessera")
LONG = bool(os.environ.get("TESSERA_LONG_TESTS"))  # scripts/test --long sets this (docs/testing-samples.md)
AT_ONCE = 2


def environment():
    """Returns the environment, which allows one thread per rank. PYTHONPATH already has the package's folder."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_LOG_LEVEL": "warning",
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(FOLDER), str(RANKS), str(SUPPORT)])}


def run(command, at_rest=300, **variables):
    """Returns (exit code, stdout and stderr together). The limit is `at_rest` seconds, and longer on a busy machine."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patient(at_rest),
                          env={**environment(), **variables})
    return done.returncode, done.stdout


def launch(ranks, program, *arguments, at_rest=300, **variables):
    """Runs `tessera launch` with a file of the folder RANKS, or with a program's text."""
    python = [sys.executable, "-B"]
    python += [RANKS / program] if program.endswith(".py") else ["-c", textwrap.dedent(program)]
    return run([TESSERA, "launch", "-n", ranks, "--", *python, *arguments], at_rest, **variables)


@contextlib.contextmanager
def parameter_servers(count):
    """Runs parameter servers. Yields the variables that name them to ranks that no launcher has started."""
    secret = secrets.token_hex(16)
    command = [TESSERA, "serve", "--listen", "127.0.0.1:0"]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                                                        env={**os.environ, "TESSERA_SERVERS_SECRET": secret}))
                   for _ in range(count)]
        for server in servers:
            stack.callback(server.terminate)
        addresses = [server.stdout.readline().split()[-1] for server in servers]  # "parameter server at HOST:PORT"
        yield {"TESSERA_SERVERS": ",".join(addresses), "TESSERA_SERVERS_SECRET": secret}


def run_forked_files(modules, *runs, at_rest=300, **variables):
    """Runs files of the folder RANKS, or other files by their paths. forked.py forks the ranks from one process, which
    imports `modules` once for all ranks. A run is (number of ranks, file, argument...). 0 ranks means one process that
    no launcher has started."""
    words = []
    for ranks, program, *arguments in runs:
        words += [*(["then"] if words else []), ranks, RANKS / program, *arguments]
    return run([sys.executable, "-B", FOLDER / "forked.py", ",".join(modules), *words], at_rest, **variables)


def _cases(suite):
    for each in suite:
        yield from _cases(each) if isinstance(each, unittest.TestSuite) else [each]


def _run_case(case):
    result, started = unittest.TestResult(), time.monotonic()
    case.run(result)
    bad = [*result.failures, *result.errors]
    verdict = "FAILED" if bad else f"skipped: {result.skipped[0][1]}" if result.skipped else "ok"
    # One call prints all lines, so that the output of cases does not mix.
    print("\n".join([f"{case.id()}: {verdict}, {time.monotonic() - started:.1f} s", *(f"{each}\n{text}" for each, text in bad)]), flush=True)
    return not bad


def main():
    """Replaces unittest.main for cases that only start processes. Two cases run at the same time. The classes have no
    setUpClass. The arguments are the names of cases to run. A "-" before a name leaves this case out."""
    names, loader = [name for name in sys.argv[1:] if not name.startswith("-")], unittest.defaultTestLoader
    left_out = tuple("." + name[1:] for name in sys.argv[1:] if name.startswith("-"))
    module = sys.modules["__main__"]
    cases = list(_cases(loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)))
    cases = [case for case in cases if not case.id().endswith(left_out)] if left_out else cases
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        good = list(pool.map(_run_case, cases))
    sys.exit(0 if good and all(good) else 1)
