"""Checks that Tessera's version is stated once, by project() in the root's CMakeLists.txt, and that all other files
agree with it.

CHANGELOG.md begins with the version. CITATION.cff and each find_package(Tessera X.Y) repeat it. No other file has it.
The package for Python reads it from CMakeLists.txt.

Usage: check_version.py ROOT
"""

import pathlib
import re
import subprocess
import sys

PROJECT = re.compile(r"^project\(Tessera VERSION (\d+\.\d+\.\d+)\b", re.MULTILINE)
HEADING = re.compile(r"^## \[([^\]]+)\]", re.MULTILINE)
CITED = re.compile(r"^version: *(\S+)", re.MULTILINE)
FOUND = re.compile(r"find_package\(Tessera\s+(\d[\d.]*)")
SAYS_IT = ["CMakeLists.txt", "CHANGELOG.md", "CITATION.cff"]
# Files that some version of Tessera wrote, and trees of sources that are made by tests of the checks.
EXCEPT = ["benchmarks/results/", "tests/golden/", "tests/fuzz/corpus/",
          "tests/layers/check_version_test.py", "tests/layers/release_test.py"]


def version_of(root):
    """Returns "X.Y.Z", or None."""
    found = PROJECT.search((root / "CMakeLists.txt").read_text(encoding="utf-8"))
    return found and found[1]


def tracked(root):
    """Returns Git's files. If the tree is without Git, returns the files outside of builds and hidden folders."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True)
    if listed.returncode == 0:
        return sorted(path for path in listed.stdout.split("\0") if path)
    paths = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
    return sorted(path.as_posix() for path in paths if path.parts[0] != "build" and not any(part.startswith(".") for part in path.parts))


def text_of(file):
    """Returns the text of a file, or None if it is no text or does not exist."""
    try:
        return file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def complaints_of_file(path, text, version):
    minor = version.rpartition(".")[0]
    yield from (f"{path}: asks for Tessera {asked}, and the version is {version}: write {minor}"
                for asked in FOUND.findall(text) if asked != minor)
    # A text such as "name==1.2.3" is another package's version.
    if path not in SAYS_IT and re.search(rf"(?<![\d.=]){re.escape(version)}(?![\d.]*\d)", text):
        yield f"{path}: says {version}, which CMakeLists.txt alone should say"


def complaints(root):
    version = version_of(root)
    if version is None:
        return ["CMakeLists.txt: has no project(Tessera VERSION X.Y.Z ...)"]
    found = []
    for path, pattern in (("CHANGELOG.md", HEADING), ("CITATION.cff", CITED)):
        said = pattern.search(text_of(root / path) or "")
        if said is None or said[1] != version:
            found.append(f"{path}: says {said[1] if said else 'no version'} first, and CMakeLists.txt {version}")
    for path in tracked(root):
        text = None if path.startswith(tuple(EXCEPT)) else text_of(root / path)
        if text is not None:
            found += complaints_of_file(path, text, version)
    return found


def main(root):
    root = pathlib.Path(root).resolve()
    found = complaints(root)
    print("\n".join(found) or f"the version is {version_of(root)} everywhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
