"""Tests that all code in the comments of the public headers compiles.

    Usage: python3 comments_test.py SOURCE COMPILER INCLUDE[:INCLUDE...]

Code is text that a comment indents by three spaces or more after an empty comment line, unless it is a list. Each piece
of code becomes a function of one translation unit, which also has the names that comments use without declaring them
(prelude.h). A piece that contains `main` is not put into a function. "..." stands for the reader's own code. The
test removes it, so no statement is left, or no argument between parentheses.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

FEWEST = 24  # pieces of code; fewer mean that they are no longer found


def pieces_of(text):
    """Yields (line, lines) for each piece of code in comments, without the slashes."""
    pieces, open_piece, behind_gap = [], None, False
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.fullmatch(r"\s*///(.*)", line)
        words = comment.group(1) if comment else None
        indented = words is not None and words.startswith("   ")
        if open_piece is not None and indented:
            open_piece[1].append(words)
        elif indented and behind_gap and not re.match(r"\s+(\*|\d+\.)\s", words):
            open_piece = (number, [words])
            pieces.append(open_piece)
        else:
            open_piece = None
        behind_gap = words is not None and words.strip() == ""
    return pieces


def compilable(line):
    line = re.sub(r"\bfor \(\.\.\.\)", "for (;;)", line)
    line = line.replace("(...)", "()")
    line = re.sub(r"^(\s*)\.\.\.", r"\1", line)
    return re.sub(r" \.\.\.(\s*(//.*)?)$", r" ;\1", line)


def translation_unit(source):
    headers = sorted((source / "include" / "tessera").glob("*.h"))
    text = "".join(f'#include "tessera/{header.name}"\n' for header in headers)
    text += '#include "' + str(pathlib.Path(__file__).resolve().with_name("prelude.h")) + '"\n'
    count = 0
    for header in headers:
        for number, lines in pieces_of(header.read_text()):
            code = "\n".join(compilable(line) for line in lines)
            is_program = re.search(r"\bint main\(", code)
            count += 1
            text += f"namespace comment_{count} {{\n" + ("" if is_program else "void code() {\n")
            text += f'#line {number} "{header}"\n{code}\n' + ("" if is_program else "}\n") + "}\n"
    return text, count


def main(source, compiler, includes):
    sample = "/// A class.\n///\n///   f(...);\n///   ...\n///\n///  1. A list\n///     goes on.\nclass A;\n/// Text\n///   goes on\n"
    assert pieces_of(sample) == [(3, ["   f(...);", "   ..."])], pieces_of(sample)
    assert [compilable(line) for line in ["for (...) {", "for (int x : y) ...", "... f();"]] == ["for (;;) {", "for (int x : y) ;", " f();"]
    text, count = translation_unit(pathlib.Path(source))
    assert count >= FEWEST, f"{count} pieces of code were found in comments, want {FEWEST}"
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder) / "comments.cc"
        unit.write_text(text)
        flags = [flag for include in includes.split(":") for flag in ("-isystem", include)]
        done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-w", "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO",
                               "-I", f"{source}/include", *flags, unit], capture_output=True, text=True)
    if done.returncode != 0:
        print("\n".join(line for line in done.stderr.splitlines() if "error" in line) or done.stderr[-4000:])
        return 1
    print(f"{count} pieces of code in comments compile")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
