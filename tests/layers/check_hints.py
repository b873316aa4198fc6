"""Checks that an error that a user can cause ends in its own remedy ("hint: ..."). The check looks for texts that have
none.

Calls of make_error, expect or TORCH_CHECK, `throw Error`, and in Python `raise` with a call count as errors. The text
of an error may come from elsewhere: from another error (message_of), or from a variable that its function makes. If
it comes from a parameter, the callers of the function add the hint. A bug of Tessera
(ExitCode::kInternal) is no fault of the user, so it needs no hint. Each hint has an id: tests/layers/check_errors.py.

Usage: check_hints.py ROOT
"""

import ast
import pathlib
import re
import sys

FOLDERS = ["include", "runtime", "sharding", "planner", "offload", "checkpoint", "optim", "engine", "python",
           "workshop/app", "workshop/launch", "workshop/models", "workshop/tokenizer"]
ERROR = re.compile(r"\b(make_error|throw (?:tessera::)?Error|expect|TORCH_CHECK(?:_\w+)?)\(")
# Matches everything that adds a hint. This is the word itself, a function or variable named for it, or the text of an
# error that was checked in the place that made it.
BRINGS_HINT = re.compile(r"[Hh]int|reason_of(?:_\w+)?\(|message_of\(|[.>]message\(\)")
INTERNAL = re.compile(r"^\s*ExitCode::kInternal\s*,")
# The text of an error that was made elsewhere. The code that catches an OutOfMemoryError adds a text about memory
# (engine/job/last_words.cc).
PASSED_ON = re.compile(r"^\s*(static_cast<ExitCode>\(|OutOfMemoryError,)")
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.){12,}"')
# Parameters that hold the text of an error. The other parameters hold names of a file, a rank or a call.
TEXT = re.compile(r"(what|why|wrong|text|message|problem|problems|reason|error|errors|said|words|complaint|costs)(_\w+)?$")
CONTROL = {"if", "for", "while", "switch", "catch", "return"}
FUNCTION = re.compile(r"([\w~]+)\s*(?:=\s*\[[^\]]*\]\s*)?\(((?:[^()]|\([^()]*\))*)\)[^()]*(?:\([^()]*\)[^()]*)*$", re.S)


def without_comments(text):
    """Returns `text` with blanks in place of comments, so that positions do not change."""
    blank = lambda found: found.group() if found.group().startswith('"') else re.sub(r"[^\n]", " ", found.group())
    return re.sub(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.S)


def without_literals(text):
    return re.sub(r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)'", lambda found: "_" * len(found.group()), text)


def end_of_call(bare, opening):
    depth = 0
    for place in range(opening, len(bare)):
        depth += (bare[place] == "(") - (bare[place] == ")")
        if depth == 0:
            return place
    return len(bare)


class Function:
    """The function or named lambda around a position in the text. It has a name, the names of those parameters that
    hold the text of an error, and the place where its body begins."""

    def __init__(self, bare, place):
        self.name, self.parameters, self.body = "", [], 0
        depth = 0
        for at in range(place - 1, -1, -1):
            depth += (bare[at] == "}") - (bare[at] == "{")
            if bare[at] != "{" or depth >= 0:
                continue
            depth = 0
            head = re.split(r"[;{}]", bare[:at][-900:])[-1]
            found = FUNCTION.search(head)
            if not found or found.group(1) in CONTROL or "namespace" in head:
                continue
            self.name, self.body = found.group(1), at
            for parameter in found.group(2).split(","):
                if re.search(r"string|char|Text", parameter) and TEXT.match(re.findall(r"\w+", parameter)[-1]):
                    self.parameters.append(re.findall(r"\w+", parameter)[-1])
            return


def is_declaration(bare, place):
    """Returns whether a type stands before the name at position `place`."""
    found = re.search(r"([\w>&*]+)\s+[&*]?(\w+::)*$", bare[max(0, place - 80) : place])
    return bool(found) and found.group(1) not in ("return", "throw", "else") and found.group(1) not in ("&&", "&")


def calls(bare, name):
    for found in re.finditer(rf"(?<![\w~]){name}(?:<\w+>)?\(", bare):
        yield found.start(), found.end() - 1


def complaints_about(text):
    """Yields pairs of a line number and a complaint."""
    clean = without_comments(text)
    bare = without_literals(clean)
    open_names, seen = set(), set()

    def look_at(start, opening):
        arguments = clean[opening + 1 : end_of_call(bare, opening)]
        if INTERNAL.match(arguments) or BRINGS_HINT.search(arguments):
            return
        function = Function(bare, start)
        words = re.findall(r"\w+", without_literals(arguments))
        if PASSED_ON.match(arguments) and (not LITERAL.search(arguments) or "Memory" in arguments):
            return
        adds_hint = BRINGS_HINT.search(clean[function.body : start])
        if any(parameter in words for parameter in function.parameters):
            if not adds_hint:
                open_names.add(function.name)
        elif LITERAL.search(arguments) or not adds_hint:
            yield clean.count("\n", 0, start) + 1, " ".join(arguments.split())[:160]

    for found in ERROR.finditer(bare):
        is_other_expect = found.group(1) == "expect" and ("expect.h" not in clean or bare[found.start() - 1] in ".>")
        if is_other_expect or is_declaration(bare, found.start()):
            continue
        yield from look_at(found.start(), found.end() - 1)
    while open_names - seen:
        name = (open_names - seen).pop()
        seen.add(name)
        for start, opening in calls(bare, name):
            if not is_declaration(bare, start):
                yield from look_at(start, opening)


def complaints_about_python(text):
    """Yields complaints about a Python source. A text may begin or end with the text of another error: f"{error}.
    ..."."""
    for node in ast.walk(ast.parse(text)):
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call) or not call.args:
            continue
        said = ast.get_source_segment(text, call.args[0])
        if LITERAL.search(said.replace("'", '"')) and "hint" not in said and not re.search(r'^f"\{\w*error\}|\{\w*error\}"$', said):
            yield node.lineno, " ".join(said.split())[:160]


def complaints(root):
    for folder in FOLDERS:
        for source in sorted((root / folder).rglob("*")):
            look = {".cc": complaints_about, ".h": complaints_about, ".cu": complaints_about, ".py": complaints_about_python}.get(source.suffix)
            for line, said in look(source.read_text(encoding="utf-8")) if look else ():
                yield f"{source.relative_to(root).as_posix()}:{line}: an error without a hint: {said}"


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or "errors bring hints")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
