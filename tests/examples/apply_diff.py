"""Applies the diff that a page shows for a program, so that the result is known to build and to run.

The diff of a program is the diff after the last mention of its path in backticks.

A hunk begins with a line of "@@". Its lines of context and the lines that it removes must stand in the program as
one block, exactly once. There are no line numbers. More than ten added lines are an error, since the page promises few.

Usage: apply_diff.py PAGE PROGRAM OUTPUT
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_LINES = 10


def diff_of(page, program):
    found = [each[1] for each in re.finditer(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
             if re.findall(r"`(examples/[^`]+)`", page[:each.start()])[-1:] == [program]]
    if len(found) != 1:
        sys.exit(f"the page shows {len(found)} diffs for {program}, where one is expected")
    return found[0].splitlines()


def hunks_of(diff):
    hunks = []
    for line in diff:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line)
    return hunks


def applied(program, hunk):
    old = "".join(line[1:] + "\n" for line in hunk if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in hunk if line[0] in " +")
    if program.count(old) != 1:
        sys.exit(f"these lines stand {program.count(old)} times in the program:\n{old}")
    return program.replace(old, new)


def main(page, program, output):
    diff = diff_of(pathlib.Path(page).read_text(encoding="utf-8"), pathlib.Path(program).resolve().relative_to(ROOT).as_posix())
    added = sum(line.startswith("+") for line in diff)
    if not 0 < added <= MOST_LINES:
        sys.exit(f"the diff adds {added} lines, where at most {MOST_LINES} are promised")
    text = pathlib.Path(program).read_text(encoding="utf-8")
    for hunk in hunks_of(diff):
        text = applied(text, hunk)
    pathlib.Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
