"""Checks blocks of code in pages without running them. Usage: check_blocks.py ROOT TESSERA

Each block must have a known language. A block that is marked as coming from a file must be in that file. It must be
possible to apply a diff, or to read both of its sides. It must be possible to read JSON. Commands must have only
options that `tessera ... --help` and our scripts show. blocks.py says how a block is marked.

The TABLES_OF_OPTIONS are checked, too: each must have a row for every option of its command, and no other rows.
"""

import ast
import functools
import json
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import blocks

LANGUAGES = {"bash", "cmake", "cpp", "diff", "json", "python", "text"}
NOTES = ("from ", "diff of ", "before and after", "with ", "no strategy", "syntax: ", "not run: ")
DESCRIPTION = re.compile(r"(?<=\S) {4,}(?=\S).*")  # text that describes a command, in a list of commands
LEADERS = re.compile(r"^(?:[A-Z_]+=\S+ +)+")
GIVEN = re.compile(r"--?[A-Za-z][\w-]*")
TABLES_OF_OPTIONS = {"docs/guide/launch.md": "launch"}
OPTION_ROW = re.compile(r"^\| `(-[^`]*)`(?:, `(-[^`]*)`)? \|", re.MULTILINE)


class Commands:
    """The options that `tessera` and scripts of this tree have."""

    def __init__(self, root, tessera):
        self.root, self.tessera = pathlib.Path(root), tessera

    @functools.cache
    def help_of(self, *words):
        """Returns the options of a (sub)command, and its subcommands. Returns None if there is no such command."""
        said = subprocess.run([self.tessera, *words, "--help"], capture_output=True, text=True, timeout=120)
        if said.returncode != 0:
            return None
        _, _, below = said.stdout.partition("Subcommands:")
        return set(GIVEN.findall(said.stdout)), set(re.findall(r"^  (\S+)", below, re.MULTILINE))

    def wrong_of_tessera(self, words):
        path, subcommands = [], self.help_of()[1] | {"tokenize", "schema"}
        while words and words[0] in subcommands:
            path.append(words.pop(0))
            known = self.help_of(*path)
            if known is None:
                return f"tessera has no {' '.join(path)}"
            subcommands = known[1]
        if not path and words and not words[0].startswith("-"):
            return f"tessera has no {words[0]}"
        options = self.help_of(*path)[0]
        if "--" in words and path in (["launch"], ["replay"]):
            at = words.index("--")
            wrong = self.wrong(words[at + 1:])
            if wrong:
                return wrong
            words = words[:at]
        return next((f"tessera {' '.join(path)} has no {word}" for word in words
                     if re.match(r"--?[A-Za-z]", word) and word.partition("=")[0] not in options), None)

    def wrong(self, words):
        """Returns what is wrong with a command, or None. Programs of other projects are not checked."""
        if not words:
            return None
        first = words[0]
        if first == "tessera":
            return self.wrong_of_tessera(list(words[1:]))
        if re.match(r"(scripts|benchmarks|examples|tests)/", first) or (re.match(r"python3?$", first) and words[1:2] and
                                                                        re.match(r"(scripts|tests)/", words[1])):
            script = first if "python" not in first else words[1]
            if not (self.root / script).exists():
                return f"there is no {script}"
            if script.startswith("benchmarks/") or script.endswith("/"):
                return None  # options of benchmarks are defined in other files; a folder has no options
            text = (self.root / script).read_text(encoding="utf-8")
            return next((f"{script} has no {word}" for word in words[1:] if re.match(r"--[a-z]", word) and word.partition("=")[0] not in text), None)
        return None

    def wrong_in(self, block):
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith(" ") or not line.strip():
                continue  # this line continues the previous line, or is no command
            line = LEADERS.sub("", DESCRIPTION.sub("", line)).split("  #")[0]
            # A list of commands gives all possible continuations in one line: `tessera checkpoint ls, show or export`.
            if not re.match(r"(tessera|scripts/|benchmarks/|examples/|tests/|python3? )", line) or re.match(r"tessera \w+ +\w+, ", line):
                continue
            try:
                words = [word.rstrip(";,") for word in shlex.split(line.replace("[", " ").replace("]", " "))]
            except ValueError:
                yield f"{line!r} is no command"
                continue
            wrong = self.wrong(words)
            if wrong:
                yield wrong


def sides_of(diff):
    lines = [line for line in diff.splitlines() if not line.startswith("@@")]
    return ["\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) for sign in "-+"]


def complaints_of_diff(root, block):
    if block.text.startswith("diff --git "):  # this is a patch
        yield from (f"the patch changes {file}, which is not there" for file in re.findall(r"^--- a/(\S+)$", block.text, re.MULTILINE)
                    if not (root / file).is_file())
        return
    if block.note.startswith("diff of "):
        source = (root / block.note.removeprefix("diff of ")).read_text(encoding="utf-8").splitlines()
        yield from (f"{line[1:].strip()!r} stands not in {block.note.removeprefix('diff of ')}" for line in block.text.splitlines()
                    if line[:1] in (" ", "-") and line[1:] not in source)
        return
    if block.note != "before and after":
        yield "a diff is a patch of git, or says `diff of FILE` or `before and after`"
        return
    for side in sides_of(block.text):
        try:
            ast.parse(side)
        except SyntaxError as error:
            yield f"a side of the diff cannot be read: {error}"


def complaints(root, block, commands):
    if block.language not in LANGUAGES:
        yield f"the block has {f'the language {block.language}' if block.language else 'no language'}; there are {', '.join(sorted(LANGUAGES))}"
    if block.note and not block.note.startswith(NOTES):
        yield f"nobody knows what to do with {block.note!r}; tests/docs/blocks.py lists the forms"
    if block.note.startswith("from "):
        file = root / block.note.removeprefix("from ")
        if not file.is_file() or block.text not in file.read_text(encoding="utf-8"):
            yield f"this does not stand in {block.note.removeprefix('from ')}"
    elif block.language == "diff":
        yield from complaints_of_diff(root, block)
    elif block.language == "json":
        try:
            json.loads(block.text)
        except ValueError as error:
            yield f"this is no JSON: {error}"
    elif block.language == "python":
        try:
            ast.parse(textwrap.dedent(block.text))
        except SyntaxError as error:
            yield f"this is no Python: {error}"
    elif block.language == "cmake" and not block.note:
        yield "CMake says where it is tested: `from FILE` or `not run: WHY`"
    elif block.language in ("bash", "text") and not block.note:
        yield from commands.wrong_in(block)


def complaints_of_tables(root, commands):
    for page, command in TABLES_OF_OPTIONS.items():
        cells = OPTION_ROW.findall((root / page).read_text(encoding="utf-8"))
        told = {option for row in cells for cell in row for option in GIVEN.findall(cell)[:1]}
        there = {option for option in commands.help_of(command)[0] if re.fullmatch(r"-\w|--[a-z-]+", option)} - {"-h", "--help", "-p"}
        yield from (f"{page}: the table has no row of {option}" for option in sorted(there - told))
        yield from (f"{page}: tessera {command} has no {option}" for option in sorted(told - there))


def main(root, tessera):
    root = pathlib.Path(root).resolve()
    commands, found = Commands(root, tessera), blocks.all_blocks(root)
    wrong = [f"{block.place}: {text}" for block in found for text in complaints(root, block, commands)]
    wrong += complaints_of_tables(root, commands)
    print("\n".join(wrong) or f"{len(found)} blocks of code in {len(blocks.pages(root))} pages are as they should be")
    return 1 if wrong or len(found) < 80 else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
