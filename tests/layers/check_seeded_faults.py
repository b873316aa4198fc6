"""Checks that the seeded faults of tests/seeded_faults.json are those of runtime/base/seeded_fault.h. Each must be used
in its file, and only there.

Usage: check_seeded_faults.py ROOT
"""

import collections
import json
import pathlib
import re
import sys

HEADER, NAMES, TABLE, PAGE = "runtime/base/seeded_fault.h", "runtime/base/seeded_fault.cc", "tests/seeded_faults.json", "docs/testing.md"
KEYS = ["name", "room", "file", "does", "tests", "expected"]
FOLDERS = ["benchmarks", "checkpoint", "engine", "examples", "include", "offload", "optim", "planner", "python", "runtime", "sharding", "workshop"]
USE = re.compile(r"\bSeededFault::(k\w+)")
WANTED = 20


def in_header(text):
    body = re.search(r"enum class SeededFault \{([^}]*)\}", text)[1]
    return [name for name in re.findall(r"\bk\w+", body) if name != "kNone"]


def uses(root):
    """Returns {enumerator: files that use it}."""
    found = collections.defaultdict(set)
    for folder in FOLDERS:
        for source in sorted((root / folder).rglob("*")):
            path = source.relative_to(root).as_posix()
            if source.suffix not in (".h", ".cc", ".cu", ".cuh") or path in (HEADER, NAMES):
                continue
            for name in USE.findall(source.read_text(encoding="utf-8")):
                found[name].add(path)
    return found


def complaints(root):
    faults = json.loads((root / TABLE).read_text(encoding="utf-8"))
    names = dict(re.findall(r'\{SeededFault::(k\w+), "(\w+)"\}', (root / NAMES).read_text(encoding="utf-8")))
    enumerators, used = in_header((root / HEADER).read_text(encoding="utf-8")), uses(root)
    page = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).exists() else ""
    if len(faults) != WANTED:
        yield f"{TABLE}: {len(faults)} faults, want {WANTED}"
    for key in ("name", "room"):
        yield from (f"{TABLE}: two faults have the {key} {value}"
                    for value, count in collections.Counter(fault[key] for fault in faults).items() if count > 1)
    if enumerators != list(names):
        yield f"{HEADER} and {NAMES} name different faults: {sorted(set(enumerators) ^ set(names)) or 'in another order'}"
    if list(names.values()) != [fault["name"] for fault in faults]:
        other = set(names.values()) ^ {fault["name"] for fault in faults}
        yield f"{NAMES} and {TABLE} name different faults: {sorted(other) or 'in another order'}"
    yield from (f"{', '.join(sorted(files))}: SeededFault::{name} is no fault of {HEADER}"
                for name, files in used.items() if name not in enumerators)
    of_text = {text: enumerator for enumerator, text in names.items()}
    for fault in faults:
        if list(fault) != KEYS:
            yield f"{TABLE}: {fault.get('name')} has {list(fault)}, want {KEYS}"
            continue
        name, file = fault["name"], fault["file"]
        files = used.get(of_text.get(name), set())
        if files != {file}:
            yield f"{name} is used in {', '.join(sorted(files)) or 'no file'}, want {file} alone"
        if not file.startswith(fault["room"] + "/"):
            yield f"{TABLE}: {file} is not in the room {fault['room']}"
        if f"`{name}`" not in page:
            yield f"{PAGE} does not name {name}"
        re.compile(fault["tests"])


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or f"{WANTED} seeded faults are where {TABLE} says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
