"""Checks that the pages of the API miss nothing. Each public declaration in include/tessera has a comment of its own,
and docs/python-api.md names everything in `__all__` of the Python package.

Usage: check_api.py ROOT
"""

import ast
import pathlib
import re
import sys

import cpp_source

HEADERS = "include/tessera"
PACKAGE, PAGE = "python/tessera/__init__.py", "docs/python-api.md"
NO_DECLARATION = ("friend", "static_assert", "extern", "TORCH_MODULE")
SAID_ONCE = "kKeepsGradients"  # each method of compression has this constant, and NoMethodConfig says what it means
MACRO = re.compile(r"^#define (?:.*\\\n)+.*", re.M)


def last_of(cpp, i, end):
    """Returns the last token of the declaration that begins at token i."""
    while i < end:
        if cpp.is_sign(i, ";"):
            break
        if cpp.is_sign(i, *cpp_source.PAIRS):
            is_body = cpp.is_sign(i, "{")
            i = cpp.partner.get(i, i)
            if is_body and not cpp.is_sign(i + 1, ";", ",", "{"):
                break
        i += 1
    return i


def body_of(cpp, tokens):
    """Returns the brace that begins the members of a class, or None. Also returns whether its members begin private."""
    for i in tokens:
        if cpp.is_sign(i, "(", "=") or cpp.is_name(i, "enum"):
            break
        if cpp.is_name(i, "class", "struct") and not cpp.is_sign(i - 1, "<", ","):
            brace = next((k for k in tokens if k > i and cpp.is_sign(k, "{", "(")), None)
            return (brace if cpp.is_sign(brace or -1, "{") else None), cpp.is_name(i, "class")
    return None, False


def is_move(cpp, tokens):
    """Returns whether this declaration moves an object: `X(X&&)` or `operator=(X&&)`."""
    bracket = next((i for i in tokens if cpp.is_sign(i, "(")), 0)
    return cpp.is_name(bracket + 1) and cpp.is_sign(bracket + 2, "&&") and (
        cpp.is_name(bracket - 1, cpp.tokens[bracket + 1].text) or cpp.is_name(bracket - 2, "operator"))


def is_declared(cpp, tokens):
    """Returns whether a page shows this declaration. A page shows no forward declaration, no move, no destructor, and
    no function that is `= default` or `= delete`."""
    words, i = [], tokens[0]
    while i <= tokens[-1]:  # the tokens inside brackets are skipped
        words.append(cpp.tokens[i].text if i < len(cpp.tokens) else "")
        i = cpp.partner.get(i, i) + 1 if cpp.is_sign(i, *cpp_source.PAIRS) else i + 1
    if words[0] in NO_DECLARATION or SAID_ONCE in words or "~" in words or words[-3:-1] in (["=", "delete"], ["=", "default"]) or is_move(cpp, tokens):
        return False
    if words[0] == "using":
        return "=" in words
    return "(" in words or "{" in words or "=" in words or not {"class", "struct", "enum"} & set(words)


def declarations(cpp, begin, end, is_public=True):
    """Yields (first token, last token) of each public declaration between two tokens, with those inside classes."""
    i = begin
    while i < end:
        if cpp.is_name(i, "namespace"):
            brace = next(k for k in range(i, end) if cpp.is_sign(k, "{", ";"))
            if cpp.is_sign(brace, "{") and cpp.is_name(i + 1) and cpp.tokens[i + 1].text != "detail":
                yield from declarations(cpp, brace + 1, cpp.partner[brace])
            i = cpp.partner.get(brace, brace) + 1
        elif cpp.is_name(i, "public", "protected", "private") and cpp.is_sign(i + 1, ":"):
            is_public, i = not cpp.is_name(i, "private"), i + 2
        else:
            last = last_of(cpp, i, end)
            tokens = range(i, min(last + 1, end))
            if is_public and is_declared(cpp, tokens):
                yield i, last
                brace, begins_private = body_of(cpp, tokens)
                if brace is not None:
                    yield from declarations(cpp, brace + 1, cpp.partner[brace], not begins_private)
            i = last + 1


def complaints_about_header(name, text):
    text = MACRO.sub(lambda macro: "\n" * macro[0].count("\n"), text)
    cpp, lines = cpp_source.Cpp(name, text), text.splitlines()
    for first, last in declarations(cpp, 0, len(cpp.tokens)):
        begin, end = (cpp.line(cpp.tokens[i].start) for i in (first, min(last, len(cpp.tokens) - 1)))
        above, below = lines[begin - 2].strip() if begin > 1 else "", lines[end].strip() if end < len(lines) else ""
        if not above.startswith("///") or above.startswith("///<"):
            if not any("///<" in line for line in lines[begin - 1:end]) and not below.startswith("///<"):
                yield f"{name}:{begin}: {lines[begin - 1].strip()} has no comment. hint: say what it is or does; the page of the C++ API shows that"


def names_of_package(text):
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets):
            return [name for name in ast.literal_eval(statement.value) if not name.startswith("__")]
    return []


def complaints(root):
    for path in sorted((root / HEADERS).glob("*.h")):
        yield from complaints_about_header(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    shown = set(re.findall(r"^::: tessera\.[\w.]*?(\w+)$", (root / PAGE).read_text(encoding="utf-8"), re.M))
    for name in names_of_package((root / PACKAGE).read_text(encoding="utf-8")):
        if name not in shown:
            yield f"{PAGE}: {name} of {PACKAGE}'s __all__ is not there. hint: add a line ::: tessera._module.{name}"


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or "each public declaration has a comment, and each name of the Python package is on its page")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
