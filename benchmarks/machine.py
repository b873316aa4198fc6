"""Reports everything on which a result depends besides the code: the machine, the versions, the commit. It uses the
standard library only."""

import json
import os
import pathlib
import platform
import subprocess

from works import REPOSITORY


def _lines(path):
    return pathlib.Path(path).read_text().splitlines()


def _output(command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cpu_model():
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def has_avx2():
    return any("avx2" in line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags"))


def facts():
    total = next(line for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": int(total.split()[1]) * 1024,
            "kernel": platform.release(), "load_average_at_start": os.getloadavg()[0]}


def _git(*arguments):
    return _output(["git", "-C", REPOSITORY, *arguments]).strip()


def commit():
    """Returns {"hash", "dirty"}. `dirty`: whether a tracked file differs from the commit."""
    return {"hash": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def versions(python, packages):
    """Returns {"python": ..., package: version}, as seen by the interpreter `python`."""
    script = ("import json, platform, sys\nfrom importlib.metadata import version\n"
              "print(json.dumps({'python': platform.python_version()} | {p: version(p) for p in sys.argv[1:]}))")
    return json.loads(_output([python, "-c", script, *packages]))
