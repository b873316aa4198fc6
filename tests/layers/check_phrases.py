"""Checks that errors name functions in the programming language of the caller. Some layers are called from C++ and from
Python. Their texts take the names of functions from runtime/border/phrase.h, which has each name for both languages.

Usage: check_phrases.py ROOT
"""

import pathlib
import re
import sys

FOLDERS = ["engine", "planner", "sharding"]
# Files whose functions only C++ programs can call, or that have their own phrases.
CPP_ALONE = ["engine/job/init.cc", "engine/job/run.cc", "engine/loop/data_parallel.cc", "engine/loop/sync_batch_norm.cc"]
TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
CPP_NAME = re.compile(r"tessera::|torch::|NoGradGuard|= true\)|std::\w+\(|make_unique|\bk(Write|Ema)\b|StepResult::")


def complaints(root):
    for folder in FOLDERS:
        for source in sorted((root / folder).rglob("*.cc")):
            path = source.relative_to(root).as_posix()
            if path in CPP_ALONE:
                continue
            for number, line in enumerate(source.read_text().splitlines(), 1):
                if line.lstrip().startswith(("//", "#include")):
                    continue
                for text in TEXT.findall(line):
                    if CPP_NAME.search(text):
                        yield f'{path}:{number}: "{text}" names a call of C++. hint: a phrase of runtime/border/phrase.h'


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or "texts name calls by phrases")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
