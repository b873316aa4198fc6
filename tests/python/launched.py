"""Starts Python programs on several ranks, as a user does."""

import os
import pathlib
import subprocess
import sys
import textwrap

FOLDER = pathlib.Path(__file__).resolve().parent
TESSERA = os.environ.get("TESSERA_BIN", "tessera")


def environment():
    """One thread a rank; where the package is, PYTHONPATH says already."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_LOG_LEVEL": "warning",
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(FOLDER)])}


def run(command, timeout=300, **variables):
    """(exit code, stdout and stderr together)."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
                          env={**environment(), **variables})
    return done.returncode, done.stdout


def launch(ranks, program, *arguments, timeout=300, **variables):
    """`tessera launch` of a file of this folder, or of a program's text."""
    python = [sys.executable, "-B"]
    python += [FOLDER / program] if program.endswith(".py") else ["-c", textwrap.dedent(program)]
    return run([TESSERA, "launch", "-n", ranks, "--", *python, *arguments], timeout, **variables)
