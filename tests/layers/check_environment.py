"""Checks that docs/environment.md names every environment variable that the code reads or sets, and no variable of
Tessera that is never read. Slurm's variables may be named in docs/guide/slurm.md instead.

The check looks at C++ and Python sources, the scripts and the CMake files. A variable counts as read if a call such as
getenv("NAME") or os.environ["NAME"] names it, if a script contains ${NAME:-...}, or if CMake contains $ENV{NAME}. A
file that reads variables through tables has their names as strings. Each string of such a file that looks like a name
(capitals and a "_") therefore counts too. Tests, benchmarks and examples also set variables of other programs, so only
their names that begin with TESSERA_ count.

Usage: check_environment.py ROOT
"""

import pathlib
import re
import subprocess
import sys

PAGE = "docs/environment.md"
PAGES = (PAGE, "docs/guide/slurm.md")
OF_OTHERS = ("tests/", "benchmarks/", "examples/")
EXCEPT = ("tests/layers/",)  # this folder names variables that are never read
CALL = re.compile(r'(?:getenv|setenv|putenv|\btext|\bhas|\btake)\(\s*"([A-Za-z]\w*)"')
NUMBER = re.compile(r'number\(\w+, "([A-Za-z]\w*)"')
ENTRY = re.compile(r"""environ\[["'](\w+)["']\]|["'](\w+)["'] (?:not )?in os\.environ""")
IN_PYTHON = re.compile(r"""environ\.(?:get|setdefault|pop)\(\s*["'](\w+)["']""")
IN_SHELL = re.compile(r"\$\{([A-Z]\w*):?[-+?=]")
IN_CMAKE = re.compile(r"\$ENV\{(\w+)\}")
STRING = re.compile(r'"([A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+_?)"')
READS = re.compile(r"getenv|setenv|\benviron\b|LauncherVariables")
ON_PAGE = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)*_?)`")


def names_in(name, text):
    """Returns the variables that a file reads or sets."""
    if name.endswith((".cmake", "CMakeLists.txt")):
        return set(IN_CMAKE.findall(text))
    if text.startswith("#!/usr/bin/env bash"):
        return set(IN_SHELL.findall(text))
    is_cpp = name.endswith((".cc", ".h", ".cu", ".cuh"))
    code = re.sub(r"//.*", "", text) if is_cpp else text
    if not READS.search(code):
        return set()
    calls = CALL.findall(code) + NUMBER.findall(code) if is_cpp else IN_PYTHON.findall(code) + [a or b for a, b in ENTRY.findall(code)]
    return set(calls) | set(STRING.findall(code))


def read_by(root):
    """Returns {variable: the first file that reads or sets it}."""
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    found = {}
    for name in sorted(filter(None, listed)):
        if name.startswith(EXCEPT) or not (root / name).is_file():
            continue
        if not (name.startswith("scripts/") or name.endswith((".cc", ".h", ".cu", ".cuh", ".py", ".cmake", "CMakeLists.txt"))):
            continue
        for variable in names_in(name, (root / name).read_text(encoding="utf-8", errors="replace")):
            if variable.startswith("TESSERA_") or not name.startswith(OF_OTHERS):
                found.setdefault(variable, name)
    return found


def complaints(root):
    read = read_by(root)
    on_page = {name for page in PAGES for name in ON_PAGE.findall((root / page).read_text(encoding="utf-8"))}
    for variable, name in sorted(read.items()):
        if variable not in on_page | NO_VARIABLES:
            yield f"{name}: reads or sets {variable}, which {PAGE} does not name. hint: add a row that says its meaning and default"
    for variable in sorted(on_page - read.keys()):
        if variable.startswith("TESSERA_") and variable not in OPTIONS_OF_THE_BUILD:
            yield f"{PAGE}: names {variable}, which nobody reads. hint: remove its row"


NO_VARIABLES = {"O_DIRECT"}  # a flag of open(2), in a file that reads variables too
OPTIONS_OF_THE_BUILD = {"TESSERA_FAULTS"}


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or f"{PAGE} names every environment variable that the code reads or sets")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
