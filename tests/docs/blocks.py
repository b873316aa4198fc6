"""Reads blocks of code in pages, and the lines that say how they are tested.

A block begins with its language. A line directly before it may say how it is tested, as `<!-- block: ... -->`:

  from FILE          FILE contains this block, and other tests build and run FILE
  diff of FILE       a diff whose context lines are in FILE; other tests apply the diff
  before and after   a diff of Python; Python can parse both sides
  with A, B          the names that the block needs (cpp_blocks.py, python_blocks_test.py)
  no strategy        JSON that is no strategy
  syntax: WHY        Python can parse it; says why it is not run here
  not run: WHY       nothing is run; says why

A diff without such a line is a git patch for existing files. Only its file names are checked here; the tests that apply
it check the rest.

Each call of `tessera` or of one of our scripts in a bash or text block uses only options that exist (check_blocks.py).
JSON is read as a strategy, or as a model if it has "model". C++ is compiled, and Python is run. Commands of bash blocks
are run, except those in the list NOT_RUN of commands_test.py, which has the reasons.
"""

import dataclasses
import pathlib
import re

PAGES = ["*.md", "docs/**/*.md", "*/README.md", "*/*/README.md"]
NOT_PAGES = ["tests/", "build/", ".venv"]
MADE = "<!-- Made by "  # marks a page that a program makes; its blocks may have no language
FENCE = re.compile(r"^( *)(```+|~~~+)(\w*)$")
NOTE = re.compile(r"^ *<!-- block: (.+) -->$")


@dataclasses.dataclass
class Block:
    page: str
    line: int
    """line of the fence, from 1"""
    language: str
    text: str
    note: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    @property
    def names(self):
        return self.note.removeprefix("with ").split(", ") if self.note.startswith("with ") else []


def blocks_of(page, text):
    lines, at, made = text.split("\n"), 0, MADE in text
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if not fence:
            at += 1
            continue
        end = next((row for row in range(at + 1, len(lines)) if lines[row] == fence[1] + fence[2]), None)
        if end is None:
            raise ValueError(f"{page}:{at + 1}: the block has no end")
        note = NOTE.match(lines[at - 1]) if at else None
        inside = "".join(line.removeprefix(fence[1]) + "\n" for line in lines[at + 1:end])
        yield Block(page, at + 1, fence[3] or ("text" if made else ""), inside, note[1] if note else "")
        at = end + 1


def pages(root):
    found = {page.relative_to(root).as_posix() for pattern in PAGES for page in root.glob(pattern)}
    return sorted(page for page in found if not page.startswith(tuple(NOT_PAGES)))


def all_blocks(root):
    root = pathlib.Path(root)
    return [block for page in pages(root) for block in blocks_of(page, (root / page).read_text(encoding="utf-8"))]
