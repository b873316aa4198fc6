"""Checks that a header whose comments use a coined word names the glossary once, with the word: `// See
docs/glossary.md: slot, unit.` must stand directly after `#pragma once`. Coined words are those that are bold in
docs/glossary.md. Headers of tests and examples are not checked.

Usage: check_glossary.py ROOT [--write]; --write puts the right line into each header.
"""

import pathlib
import re
import subprocess
import sys

GLOSSARY = "docs/glossary.md"
NOT_LOOKED_AT = ("tests/", "examples/", "benchmarks/", "runtime/comm/c10d/gloo_stubs/")
BOLD = re.compile(r"^\| \*\*([a-z -]+)\*\* \|", re.M)
LINE = re.compile(r"^// See docs/glossary\.md: ([a-z, -]+)\.\n", re.M)
COMMENT = re.compile(r"//[/!<]*(.*)")
HEAD = "#pragma once\n"


def coined_words(glossary):
    return set(BOLD.findall(glossary))


def words_used(text, coined):
    """Returns the coined words in the comments, in the singular."""
    comments = " ".join(part.strip() for part in COMMENT.findall(LINE.sub("", text))).lower()
    return {word for word in coined if re.search(rf"\b{re.escape(word)}s?\b", comments)}


def with_line(text, used):
    """Returns the header's text with the line about the glossary that it should have."""
    text = re.sub(r"^#pragma once\n\n// See docs/glossary\.md: .*\n", HEAD, text, flags=re.M)
    line = f"\n// See {GLOSSARY}: {', '.join(sorted(used))}.\n" if used else ""
    return text.replace(HEAD, HEAD + line, 1)


def headers(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "*.h"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and not name.startswith(NOT_LOOKED_AT) and (root / name).is_file()]


def complaints(root):
    coined = coined_words((root / GLOSSARY).read_text(encoding="utf-8"))
    for name in headers(root):
        text = (root / name).read_text(encoding="utf-8")
        used, lines = words_used(text, coined), LINE.findall(text)
        wanted = [", ".join(sorted(used))] if used else []
        if lines != wanted or (used and with_line(text, used) != text):
            have = " and ".join(f'"{words}"' for words in lines) or "none"
            yield (f'{name}: coined words in comments: {", ".join(sorted(used)) or "none"}; words that its line of the glossary names: {have}. '
                   "hint: check_glossary.py ROOT --write puts the right line behind #pragma once")


def write(root):
    coined = coined_words((root / GLOSSARY).read_text(encoding="utf-8"))
    for name in headers(root):
        text = (root / name).read_text(encoding="utf-8")
        right = with_line(text, words_used(text, coined))
        if right != text:
            (root / name).write_text(right, encoding="utf-8")


def main(root, *options):
    root = pathlib.Path(root)
    if "--write" in options:
        write(root)
    found = list(complaints(root))
    print("\n".join(found) or "headers that use coined words name the glossary")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
