"""Draws comments of C++ and Python sources with a seed, so that people can read them: a newcomer should find each
sentence whole and plain.

A comment is a block of whole lines, a text behind code, or a docstring. Sources of other projects are left out. The
same seed draws the same comments as long as the sources do not change. Each comment is printed with its file and line,
and its sentences below it, each with a number.

Usage: draw_comments.py ROOT [--seed N] [--count N] [--folder NAME ...]
"""

import argparse
import ast
import dataclasses
import pathlib
import random
import re
import subprocess
import sys

CPP = {".h", ".cc", ".cu", ".cuh"}
OF_OTHERS = ("runtime/comm/c10d/gloo_stubs/",)
WHOLE = re.compile(r"^[ \t]*//[/!<]* ?(.*)$")
BEHIND = re.compile(r"^(?=\s*[^\s/])(?:[^\"'/]|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|/(?!/))*//[/!<]* ?(.*)$")
NO_SENTENCE = re.compile(r"NOLINT|IWYU|clang-format|namespace|[\w:]+$|-{5,}|See docs/glossary")


@dataclasses.dataclass
class Comment:
    place: str
    text: str

    @property
    def sentences(self):
        """Returns whole sentences, or the phrase behind code. Lists, tables and code in a comment are not divided."""
        return [sentence for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])", self.text) if re.search(r"[a-z]", sentence)]


def of_cpp(name, text):
    lines, block, first = text.split("\n"), [], 0
    for number, line in enumerate([*lines, ""], 1):
        whole = WHOLE.match(line)
        if whole:
            first = first if block else number
            block.append(whole[1])
            continue
        if block:
            yield Comment(f"{name}:{first}", " ".join(part.strip() for part in block).strip())
            block = []
        behind = BEHIND.match(line) if "//" in line else None
        if behind:
            yield Comment(f"{name}:{number}", behind[1].strip())


def of_python(name, text):
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            yield Comment(f"{name}:{node.body[0].lineno}", re.sub(r"\s+", " ", ast.get_docstring(node)))
    block, first = [], 0
    for number, line in enumerate([*text.split("\n"), ""], 1):
        whole = re.match(r"^\s*#(?!!) ?(.*)$", line)
        if whole:
            first = first if block else number
            block.append(whole[1])
            continue
        if block:
            yield Comment(f"{name}:{first}", " ".join(part.strip() for part in block).strip())
            block = []
        behind = re.match(r"^(?:[^\"'#]|\"[^\"]*\"|'[^']*')*\S\s{2,}# (.*)$", line)
        if behind:
            yield Comment(f"{name}:{number}", behind[1].strip())


def comments(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    for name in sorted(listed):
        suffix = pathlib.PurePath(name).suffix
        if suffix not in CPP | {".py"} or name.startswith(OF_OTHERS):
            continue
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        for comment in of_python(name, text) if suffix == ".py" else of_cpp(name, text):
            if comment.sentences and not NO_SENTENCE.match(comment.text):
                yield comment


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--folder", nargs="*", default=[], help="only these folders")
    options = parser.parse_args()
    there = [each for each in comments(options.root) if each.place.startswith(tuple(f"{folder}/" for folder in options.folder) or "")]
    drawn = random.Random(options.seed).sample(there, min(options.count, len(there)))
    number = 0
    for comment in sorted(drawn, key=lambda each: each.place):
        print(comment.place)
        for sentence in comment.sentences:
            number += 1
            print(f"  {number}. {sentence}")
    print(f"{len(drawn)} of {len(there)} comments, {number} sentences, seed {options.seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
