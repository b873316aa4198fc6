"""Checks that each remedy ("hint: ...") that an error may have has an id, and that docs/errors.md has a row for it.

    blocks.3: wanted 4 microbatches, got 3. [T0217] hint: call backward first

An id stands in the source, directly before its remedy. The id belongs to that error for ever, since people search for
it. docs/errors.md is made from the sources, and also lists the ids of errors that no longer exist. scripts/errors gives
new ids and writes the page.

Usage: check_errors.py ROOT
"""

import ast
import collections
import pathlib
import re
import sys

import error_texts

PAGE, CODES = "docs/errors.md", "include/tessera/exit_code.h"
GONE = "retired"
# Each entry has a heading, a remark about its error texts, and the folders whose errors belong to it. It also has the
# exit code if the sources do not show it. The first entry that matches an error is used.
ROOMS = [("Strategy files and configurations", "File, line, column and key come before each.", ["runtime/config"], "kConfig"),
         ("Start of a job", "The launcher, its variables, and how ranks meet and miss each other.", ["workshop/launch", "runtime/comm"], ""),
         ("Files, disks and limits of the system", "", ["runtime/base", "offload"], ""),
         ("Checkpoints", "", ["checkpoint"], ""),
         ("Data and tokenizers", "", ["runtime/data", "workshop/tokenizer"], ""),
         ("Models", "", ["workshop/models"], ""),
         ("Engine", "", ["include", "runtime", "sharding", "planner", "optim", "engine"], ""),
         ("Commands", "", ["workshop"], ""),
         ("Python", "", ["python"], "")]
HEAD = """# Errors

<!-- Made by scripts/errors from the sources. Change the texts there, not this page. -->

Each error of Tessera that a program, a strategy, a file or a machine can cause says who, where, what was wanted and what was got; then its
id and what to do about it: `[T0217] hint: ...`. This page has a row for each id. Names in braces are what the program puts there. The exit
code is that of a program that does not catch the error (`include/tessera/exit_code.h`); a warning ends nothing. An error without an id is an
internal one: please report it.

Where the sources call something for C++ and for Python, both are here: `C++ / Python`. On the site, `errors.html#T0217` is the row of an id.
[What to do](troubleshooting.md) has the errors that come most often.
"""
ROW = re.compile(r'^\| <a id="(T\d{4})"></a>T\d{4} \| (.*?) \| (.*?) \| (.*) \|$', re.MULTILINE)


def escaped(text):
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("`", "\\`")


def read_sources(root):
    """Returns two dictionaries, for C++ and for Python: {path: text}."""
    cpp, python = {}, {}
    for folder in sorted({folder.partition("/")[0] for _, _, folders, _ in ROOMS for folder in folders}):
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            # Files named *_docs.cc are left out, since they only show samples of errors.
            if file.suffix in (".cc", ".h", ".cu", ".cuh") and not path.endswith("_docs.cc"):
                cpp[path] = file.read_text(encoding="utf-8")
            elif file.suffix == ".py":
                python[path] = file.read_text(encoding="utf-8")
    return cpp, python


def read_errors(root):
    """Returns all errors with a remedy, in the order of paths and lines."""
    cpp, python = read_sources(root)
    numbers = {name: number for text in python.values() for name, number in error_texts.python_numbers(ast.parse(text)).items()}
    return [*error_texts.CppTexts(cpp).errors(), *(error for path, text in python.items() for error in error_texts.python_errors(path, text, numbers))]


def read_page(root):
    """Returns the rows of the page: {id: (exit codes, text, remedy)}. The codes of an error that no longer exists are
    GONE."""
    page = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).exists() else ""
    return {row[1]: (row[2], row[3], row[4]) for row in ROW.finditer(page)}


def room_of(error):
    return next(room for room in ROOMS if error.path.startswith(tuple(folder + "/" for folder in room[2])))


def row_of(error, numbers):
    """Returns (exit codes, text, remedy) in the form in which the page shows them."""
    usual = room_of(error)[3]
    codes = sorted({str(numbers.get(code, code)) for code in [*error.codes, usual] if code}) or [numbers[""]]
    return escaped(" or ".join(codes)), escaped(error.text or "{...}"), escaped(error.remedy)


def rows_of(root, errors):
    """Returns {id: (exit codes, text, remedy)} of the sources."""
    names = dict(re.findall(r"\b(k\w+) = (\d+),", (root / CODES).read_text(encoding="utf-8")))
    numbers = {**names, "kWarning": "a warning", "kErrno": "71, 73, 74 or 77", "": "–"}
    return {error.id: row_of(error, numbers) for error in errors if error.id}


def page_of(root, errors, gone):
    """Returns the text of the page. `gone`: rows of ids that are not in the sources any more."""
    rows = rows_of(root, errors)
    sections = collections.defaultdict(dict)
    for error in errors:
        if error.id:
            sections[room_of(error)[0]][error.id] = rows[error.id]
    sections["No longer given"] = gone
    text = HEAD
    for heading, intro, *_ in [*ROOMS, ("No longer given", "Errors of earlier versions.")]:
        if sections[heading]:
            text += f"\n## {heading}\n\n" + (intro + "\n\n" if intro else "") + "| id | exit code | error | what to do |\n|---|---|---|---|\n"
            text += "".join(f'| <a id="{id}"></a>{id} | {" | ".join(row)} |\n' for id, row in sorted(sections[heading].items()))
    return text


def words(*texts):
    return set(re.findall(r"[a-z]+", re.sub(r"\{[^{}]*\}", "", " ".join(texts).lower())))


def is_other_error(old, new):
    """Returns whether the two rows differ so much that they cannot be one error whose text has changed."""
    if old[1] == new[1] or old[2] == new[2]:
        return False
    before, now = words(*old[1:]), words(*new[1:])
    return 3 * len(before & now) < len(before | now)


def complaints(root, errors, reworded=()):
    """Yields a complaint for each fault. It does not check whether the page is up to date."""
    page = read_page(root)
    places = collections.defaultdict(list)
    for error in errors:
        place = f"{error.path}:{error.line}"
        if error.id:
            places[error.id].append(place)
        else:
            yield f"{place}: a remedy without an id: {error.remedy[:80]}. hint: scripts/errors gives it one"
        if len(re.sub(r"\{[^{}]*\}", "", error.remedy).split()) < 2:
            yield f'{place}: a remedy without words: "{error.remedy}". hint: let its words stand behind "hint: "'
    rows = rows_of(root, errors)
    for id, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{id} is given at {' and '.join(where)}. hint: take it away at one place, and call scripts/errors"
        if page.get(id, ("",))[0] == GONE:
            yield f"{where[0]}: {id} was retired. hint: take it away, and call scripts/errors"
        elif id in page and id not in reworded and is_other_error(page[id], rows[id]):
            yield (f"{where[0]}: {id} was another error: {page[id][1][:80]}. hint: take the id away, and call scripts/errors; or where it says "
                   f"the same, scripts/errors --reworded {id}")
    for id, row in page.items():
        if id not in places and row[0] != GONE:
            yield f"{id} is in no source: {row[1][:80]}. hint: put it back; or where the error is gone, scripts/errors --retire {id}"


def all_complaints(root):
    errors = read_errors(root)
    found = list(complaints(root, errors))
    if not found:
        gone = {id: row for id, row in read_page(root).items() if row[0] == GONE}
        if not (root / PAGE).exists() or (root / PAGE).read_text(encoding="utf-8") != page_of(root, errors, gone):
            found.append(f"{PAGE} is not as the sources say. hint: call scripts/errors")
    return found


def main(root):
    found = all_complaints(pathlib.Path(root))
    print("\n".join(found) or f"errors have ids, and {PAGE} has them all")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
