"""Checks that a folder has at most 30 files, besides the files of its own folders. EXCEPT has the folders that may have
more, with the reason.

Usage: check_folders.py ROOT
"""

import collections
import pathlib
import posixpath
import subprocess
import sys

MOST = 30
EXCEPT = {
    "include/tessera": "programs include public headers by these names",
    "runtime/comm": "the interface of the transports, which rooms below use; it has no smaller part that knows less",
    "benchmarks": "Python modules that import each other by name, started from their folder",
    "benchmarks/results": "a file for each run that a page shows",
    "docs": "pages whose addresses others link to; design/, faults/, guide/ and recipes/ have the rest",
    "tests/layers": "each check has a test beside it",
}


def complaints(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    counts = collections.Counter(posixpath.dirname(name) for name in listed)
    for folder, count in sorted(counts.items()):
        if count > MOST and folder not in EXCEPT:
            yield f"{folder or 'the root'} has {count} files, and {MOST} are the most. hint: make a folder of those that know least of the others"
    for folder in EXCEPT:
        if counts[folder] <= MOST:
            yield f"{folder} has {counts[folder]} files. hint: remove it from EXCEPT of check_folders.py"


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or f"no folder has more than {MOST} files, but {len(EXCEPT)} with a reason")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
