"""Checks that comments of C++ sources are sentences that fit the page. No line is longer than 120 columns, no sentence
begins with "Of", and each header has a comment that describes it. A .cc file with more than 250 lines has a paragraph at
its head that says how the file does its work; tests need none. The name of a test has a subject: it does not begin with
"And", "Of" or "But".

Usage: check_comments.py ROOT
"""

import pathlib
import re
import subprocess
import sys

COLUMNS = 120
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
LINES_WITHOUT_HEAD = 250
HEAD_ENDS = 70  # the line before which the paragraph begins
HEAD = re.compile(r"(?:^//(?!/).*\n){3}|(?:^///.*\n){5}", re.M)
NO_HEAD = ("tests/", "runtime/comm/c10d/gloo_stubs/")
COMMENT = re.compile(r"//[/!<]* ?(.*)")
TEST_NAME = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*((?:And|Of|But)(?:[A-Z0-9]\w*)?)\s*\)", re.M)
BLOCK = re.compile(r"(?:^[ \t]*//[/!<]* ?.*\n)+", re.M)


def sources(root):
    names = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if pathlib.PurePath(name).suffix in SUFFIXES]


def begins_with_of(text):
    """Returns the line numbers, from 1, of comments in which a sentence begins with "Of". A sentence in a comment
    behind code may also begin with a small letter."""
    for block in BLOCK.finditer(text):
        first = text[: block.start()].count("\n") + 1
        begun = True  # the line begins a sentence
        for number, line in enumerate(block.group().splitlines(), first):
            words = COMMENT.search(line).group(1)
            if (begun and words.startswith("Of ")) or re.search(r"[.!?] Of ", words):
                yield number
            begun = not words or words.endswith((".", "!", "?"))
    for number, line in enumerate(text.splitlines(), 1):
        code, slashes, comment = line.partition("//")
        if code.strip() and slashes and re.match(r"[/<!]* ?[oO]f ", comment):
            yield number


def complaints(root):
    for name in sources(root):
        text = (root / name).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            without_addresses = re.sub(r"\w+://\S+", "", line)
            if len(without_addresses) > COLUMNS and "//" in without_addresses:
                yield f"{name}:{number}: {len(line)} columns. hint: break the comment within {COLUMNS}"
        for number in begins_with_of(text):
            yield f'{name}:{number}: a sentence begins with "Of". hint: give it a subject and a verb'
        for test in TEST_NAME.finditer(text):
            number = text[: test.start()].count("\n") + 1
            yield f"{name}:{number}: the test {test[1]}.{test[2]} has no subject. hint: name its subject, condition and result"
        lines = text.splitlines(keepends=True)
        has_head = HEAD.search("".join(lines[:HEAD_ENDS])) or name.startswith(NO_HEAD)
        if name.endswith(".cc") and len(lines) > LINES_WITHOUT_HEAD and not has_head:
            yield f"{name}: {len(lines)} lines without a paragraph at the head. hint: say in 3 lines or more how the file goes about its work"
        if name.endswith(".h") and "//" not in text:
            yield f"{name}: no comment. hint: say what it is and who calls it"


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or "comments are sentences within the columns, and tests have names with a subject")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
