"""Checks that docs/coverage.md claims nothing that cannot be looked up: every name in backticks exists in this tree.

Such a name is that of a test (`FILE: Suite.Name`, or `FILE: method` in Python), a path from the root or from include/,
a command of `tessera` with its options, or a key of the strategy file, with one of its values or without (`sync.type:
diloco`).

Each row has a technique that no other row has, one of the VERDICTS, and a remark. A row that says "yes" names the
evidence, and a row that says "in part" or "no" says what is missing.

Usage: check_coverage.py ROOT
"""

import functools
import json
import pathlib
import re
import sys

import check_docs

PAGE = "docs/coverage.md"
SCHEMA = "docs/strategy.schema.json"
COMMANDS = "workshop/app"  # the sources that declare commands and their options
VERDICTS = ("yes", "in part", "no", "out of scope")
HEADING = ["technique", "there", "what shows it, and what is missing"]
NAME = re.compile(r"`([^`\n]+)`")
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
KEY = re.compile(r"([a-z][\w.]*)(?:: (\w+))?")


@functools.cache
def values_of_keys(root):
    """Maps each key of the strategy file, such as "sync.type", to the words that the key allows. There are none if any
    text is allowed."""
    def keys(schema, before):
        for name, inner in schema.get("properties", {}).items():
            yield before + name, tuple(inner.get("enum", ()))
            yield from keys(inner, before + name + ".")
    return dict(keys(json.loads((root / SCHEMA).read_text(encoding="utf-8")), ""))


@functools.cache
def words_of_commands(root):
    """Returns the quoted words in the sources of the commands, such as "bench" and "--fit". It returns both names of
    "-n,--ranks"."""
    sources = sorted((root / COMMANDS).rglob("*.cc"))
    return {word for source in sources for text in LITERAL.findall(source.read_text(encoding="utf-8")) for word in text.split(",")}


def words_to_look_up(command):
    """Returns the words to look up. These are plan and --strategy for "tessera plan --strategy auto", since the word
    after an option is its value."""
    words = command.split()[1:]
    return [word for i, word in enumerate(words) if word.startswith("-") or not any(before.startswith("-") for before in words[:i])]


def exists(root, name):
    test = check_docs.TEST.fullmatch(f"`{name}`")
    if test:
        return (root / test[1]).is_file() and check_docs.has_test(root, test[1], test[2])
    if name.startswith("tessera "):
        return words_of_commands(root).issuperset(words_to_look_up(name))
    if "/" in name:
        return any((root / folder / name).exists() for folder in ("", "include"))
    key = KEY.fullmatch(name)
    values = values_of_keys(root).get(key[1]) if key else None
    return values is not None and (key[2] is None or key[2] in values)


def rows(text):
    """Returns the cells of each row in the tables of techniques, even if a row has too many or too few cells."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells == HEADING)
        if inside and cells != HEADING and set(line) - set("|- "):
            yield cells


def complaints(root):
    text = (root / PAGE).read_text(encoding="utf-8")
    for name in NAME.findall(text):
        if not exists(root, name):
            yield f"names `{name}`, which is no test, path, command or key of the strategy that there is"
    seen = set()
    for cells in rows(text):
        technique = cells[0]
        if len(cells) != len(HEADING):
            yield f'the row "{technique}" has {len(cells)} cells, and {len(HEADING)} are wanted'
            continue
        if technique in seen:
            yield f'the technique "{technique}" has two rows'
        seen.add(technique)
        verdict, shown = cells[1:]
        if verdict not in VERDICTS:
            yield f'the row "{technique}" says "{verdict}", and one of {", ".join(VERDICTS)} is wanted'
        elif verdict == "yes" and not NAME.search(shown):
            yield f'the row "{technique}" says "yes", and names nothing that shows it'
        elif verdict in ("in part", "no") and not re.search(r"\w", NAME.sub("", shown)):
            yield f'the row "{technique}" says "{verdict}", and not what is missing'
    if not seen:
        yield "has no row under | " + " | ".join(HEADING) + " |"


def main(root):
    root = pathlib.Path(root).resolve()
    found = [f"{PAGE}: {text}" for text in complaints(root)]
    print("\n".join(found) or f"{PAGE} names what is there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
