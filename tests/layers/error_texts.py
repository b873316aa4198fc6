"""Reads the texts of errors from C++ and Python sources. It returns each text with a remedy ("hint: ...") as it would
be printed.

If the program puts a value into the text, the text has a placeholder with the value's name in the source: "{path}:
{bytes} bytes, want {wanted}". If the remedy comes from a constant, a variable or a separate function, the error's
text comes from the places that use the remedy.

This module is no compiler. It recognizes only the few ways in which this tree puts texts together, and gives "{...}"
for everything else.
"""

import ast
import bisect
import dataclasses
import errno
import functools
import os
import re

from cpp_source import CHECKS, NO_FUNCTION, SAYS_ALL, SAYS_FIRST, Cpp

HINT = re.compile(r"(?:\[(T\d{4})\] )?hint: ?")
CODES = {**CHECKS, "log_warning": "kWarning", "log_info": "kWarning"}
MAKERS = {"make_error", "Error"}
# Words of an expression that do not describe a value.
WORDLESS = set("std string to_string static_cast int64_t int size_t double auto c_str str format fmt c10 at tessera phrases front value get first second"
               " self this quoted_text clipped format_bytes name_of joined say message_of strerror s c d i".split())
METHODS = ("what", "data", "begin", "empty", "size", "native", "generic_string", "toStringRef", "index", "count")
MARK = "\0"  # in a text, this marks the place for the text of a constant, a variable or a function
MOST_TEXTS, MOST_CODES, MOST_STEPS, MOST_FILES = 6, 3, 5, 25
DEFAULT_CODES = {"Error": (64,)}  # exit codes of Python's exceptions
CODES_OF_FOLDERS = {"python/tessera/import_config": (78,)}  # codes of texts that reach an exception through a function
CODE_OF_ERRNO = "runtime/base/process/process_limits.cc"


@dataclasses.dataclass
class Error:
    path: str
    line: int
    offset: int  # offset of the error's id, or of its "hint: ", in the source
    id: str
    codes: tuple  # names in ExitCode; "kWarning" of warnings; "kErrno" if the system reason decides; empty if unknown
    text: str
    remedy: str


class CppTexts:
    """The errors of all C++ sources. `texts`: [path] = source."""

    def __init__(self, texts):
        self.texts = texts
        self.words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
        self.source = functools.cache(lambda path: Cpp(path, texts[path]))
        self.places = functools.cache(self.find_places)
        self.constant = functools.cache(self.find_constant)
        self.codes = functools.cache(self.find_codes)

    def find_places(self, name):
        """Returns [(source, token)] of all places of a name. The list is empty for a name that occurs in many files,
        since it then means several things."""
        paths = [path for path, words in self.words.items() if name in words]
        return [place for path in paths[:MOST_FILES + 1] if len(paths) <= MOST_FILES for place in self.places_in(self.source(path), name)]

    @staticmethod
    def places_in(source, name):
        return [(source, i) for i, token in enumerate(source.tokens) if token.kind == "name" and token.text == name]

    def find_constant(self, name):
        """Returns the text of the constant kName, or a Phrase's texts for C++ and for Python. Returns None if there is
        no such constant."""
        for source, i in self.places(name) if re.match(r"k[A-Z]", name) else ():
            after = source.partner[i + 1] + 1 if source.is_sign(i + 1, "[") else i + 1
            value = source.tokens[after + 1:after + 6]
            if not source.is_sign(after, "=") or not value:
                continue
            if value[0].kind == "text" and source.is_sign(after + 2, ";"):
                return value[0].text
            if source.is_name(i - 1, "Phrase"):
                return " / ".join(dict.fromkeys(re.sub(r'^R"\w*\(|\)\w*"$', "", token.text) for token in value if token.kind in ("text", "raw")))
        return None

    # ------------------------------------------------------------------------------------------------------ the text of an expression

    def say(self, source, low, high, focus=-1):
        """Returns the text of [low, high). If the expression chooses between texts, the one with the token `focus` is
        taken. A `focus` that is no text gives MARK."""
        while source.is_sign(low, "(") and source.partner.get(low) == high - 1:
            low, high = low + 1, high - 1
        listed = source.cut(low, high, ",")
        if len(listed) > 1:
            return "".join(self.say(source, *part, focus) for part in listed)
        choice = self.choice(source, low, high)
        if choice:
            chosen = next((part for part in choice if part[0] <= focus < part[1]), None)
            if chosen:
                return self.say(source, *chosen, focus)
            return "|".join(dict.fromkeys(filter(None, (self.say(source, *part).rstrip() for part in choice)))) or "{...}"
        summands = source.cut(low, high, "+", "<<")
        if len(summands) > 1:
            return "".join(self.say(source, *part, focus) for part in summands)
        if high - low == 1 and source.tokens[low].kind == "text":
            return source.tokens[low].text
        called = self.said_by_call(source, low, high, focus)
        if called is not None:
            return called
        if low <= focus < high:
            return MARK
        names = [source.tokens[k].text for k in range(low, high) if source.is_name(k) and source.tokens[k].text not in WORDLESS
                 and not (source.is_name(k, *METHODS) and source.is_sign(k + 1, "("))]
        if names and self.constant(names[-1]) is not None and high - low <= 3:
            return self.constant(names[-1])
        names = [name for name in names if not re.match(r"k[A-Z]", name)] or names
        return "{" + (re.sub(r"^k(?=[A-Z])|_$", "", names[-1]) if names else "...") + "}"

    def choice(self, source, low, high):
        """Returns both branches after a "?" in [low, high), or nothing."""
        question = source.cut(low, high, "?")[0][1]
        if question == high:
            return ()
        depth = 0
        for begin, end in source.cut(question + 1, high, "?", ":")[:-1]:
            depth += 1 if source.is_sign(end, "?") else -1
            if depth < 0:
                return (question + 1, end), (end + 1, high)
        return ()

    def said_by_call(self, source, low, high, focus):
        """Returns the text of a call that puts a text together, or that returns its argument. Returns None for other
        calls."""
        opening = source.partner.get(high - 1, -1)
        if not source.is_sign(high - 1, ")", "}") or opening + 1 >= high - 1:
            return None
        first, name = source.called(opening)
        if first != low:
            return None
        arguments = source.cut(opening + 1, high - 1, ",")
        if name in SAYS_ALL:
            return "".join(self.say(source, *part, focus) for part in arguments)
        if name == "format":
            return self.fill(source, arguments, focus)
        if name == "rank_name":
            return "rank {rank}/{world_size}"
        return self.say(source, *arguments[0], focus) if name in SAYS_FIRST else None

    def fill(self, source, arguments, focus):
        """Returns the text that fmt::format makes."""
        form, values = self.say(source, *arguments[0], focus), arguments[1:]
        left = iter(values)

        def one(found):
            if not found[0].startswith("{") or found[0] == "{{":
                return found[0][0]
            value = values[int(found[1])] if found[1] and int(found[1]) < len(values) else next(left, None)
            return self.say(source, *value, focus) if value else "{...}"

        return re.sub(r"\{\{|\}\}|\{(\d*)(?::[^{}]*)?\}", one, form)

    # ------------------------------------------------------------------------------------------------------------------- one error

    def texts_before(self, source, i, text, steps=0):
        """Returns the texts that the error with the hint in token i may have, one for each place that gives its
        beginning. `text`: the part of the text that is known so far."""
        low, _, call = source.expression(i)
        holder = self.holder(source, i)
        if source.is_sign(low - 1, "+="):
            begun = self.first_value(source, low - 2)
            if begun is None:  # this is a parameter, for which callers give the text
                return [given for other, k in self.uses(source, holder) for given in [self.first_argument(other, k)] if "hint:" not in given]
            text = begun + text
        if re.match(r"[\s.]*[^\s.:;,]", text) or steps >= MOST_STEPS:
            return [text]
        if source.is_sign(call, "(") and source.called(call)[1] not in MAKERS | NO_FUNCTION:
            return [before + text for before in self.texts_of_wrapper(source, source.called(call)[1])] or [text]
        found = []
        for other, k in self.uses(source, holder):
            begin, end, _ = other.expression(k)
            found += self.texts_before(other, k, self.say(other, begin, end, k).split(MARK)[0] + text, steps + 1)
        return list(dict.fromkeys(filter(None, found))) or [text]

    def holder(self, source, i):
        """Returns the token that defines the constant, local variable or function with the text of token i. Returns -1
        if there is none."""
        low = source.expression(i)[0]
        if source.is_sign(low - 1, "=") or source.is_sign(low - 1, "+=") and self.first_value(source, low - 2) is not None:
            return low - 4 if source.is_sign(low - 2, "]") else low - 2
        return source.function(i)[1]

    def uses(self, source, holder):
        """Returns the places where the constant, variable or function at token `holder` is used."""
        if not source.is_name(holder):
            return []
        name, maker = source.tokens[holder].text, source.function(holder)
        if source.is_sign(holder - 1, ".", "->"):  # this is a member that is a lambda
            paths = [path for path, words in self.words.items() if name in words and path.partition("/")[0] == source.path.partition("/")[0]]
            return [(other, k) for other in map(self.source, paths) for _, k in self.places_in(other, name)
                    if other.is_sign(k - 1, ".", "->") and other.is_sign(k + 1, "(")]
        own = [k for _, k in self.places_in(source, name)
               if k != holder and not source.is_sign(k + 1, ".") and source.function(k)[0] not in ("", name)]
        if maker[0] and not source.is_sign(holder + 1, "("):  # this is a local variable
            return [(source, k) for k in own if k > holder and source.function(k) == maker]
        others = [(other, k) for other, k in self.places(name) if other is not source]
        if own or any(other.body_at(k) for other, k in others):  # this is another function of that name
            return [(source, k) for k in own]
        return [(other, k) for other, k in others if other.function(k)[0] not in ("", name)]

    def first_value(self, source, variable):
        """Returns the first text of a local variable, or None for other names."""
        name, maker = source.tokens[variable].text, source.function(variable)
        for k in range(max(maker[1], 0), variable):
            if source.is_name(k, name) and source.is_name(k - 1) and source.is_sign(k + 1, "=") and source.function(k) == maker:
                return self.say(source, k + 2, source.argument(k + 2)[1])
        return None

    def first_argument(self, source, k):
        opening = k + 1
        return self.say(source, *source.cut(opening + 1, source.partner[opening], ",")[0]) if source.is_sign(opening, "(") else ""

    def find_codes(self, source, i, steps=0):
        """Returns the ExitCodes with which the program ends after the text of token i, as far as they can be found."""
        call = source.expression(i)[2]
        if source.is_sign(call, "(") and source.called(call)[1] not in NO_FUNCTION:
            name = source.called(call)[1]
            if name in CODES:
                return (CODES[name],)
            found = self.codes_in(source, call, source.partner[call])
            if not found and name in MAKERS:  # this is `code`, which was chosen before
                return self.codes_in(source, max(source.function(i)[1], 0), call)
            if found:
                return found
            found = self.codes_of_wrapper(source, name, steps) if steps < MOST_STEPS else ()
            if found:
                return found
        users = self.uses(source, self.holder(source, i)) if steps < MOST_STEPS else ()
        found = tuple(dict.fromkeys(code for other, k in users for code in self.codes(other, k, steps + 1)))
        body = source.body_at(source.function(i)[1]) if steps == 0 and not found else None
        return self.codes_in(source, *body) if body else found

    def made_by(self, source, name):
        """Yields (source, bracket) of each call that makes an error in the function `name`."""
        bodies = {other: other.body(name) for other, _ in [(source, 0), *self.places(name)]}
        bodies = {other: body for other, body in bodies.items() if body}
        near = {other: body for other, body in bodies.items() if other.path.rpartition("/")[0] == source.path.rpartition("/")[0]}
        bodies = near or bodies
        other, body = (source, bodies[source]) if source in bodies else next(iter(bodies.items())) if len(bodies) == 1 else (source, (0, 0))
        for k in range(*body):
            word = other.tokens[k].text
            if other.is_name(k) and other.is_sign(k + 1, "(") and not other.is_sign(k + 2, ")") and (
                    word in CODES or word in MAKERS or word == "refuse" or word.endswith("_error")):
                yield other, k + 1

    def codes_of_wrapper(self, source, name, steps):
        """Returns the exit codes of errors that the function `name` makes."""
        return next(filter(None, (self.codes(other, opening + 1, steps + 1) for other, opening in self.made_by(source, name))), ())

    def texts_of_wrapper(self, source, name):
        """Returns the texts that the function `name` puts before a hint that it gets."""
        for other, opening in self.made_by(source, name):
            given = next((k for k in range(opening, other.partner[opening]) if other.is_name(k) and re.fullmatch(r"hint|why_and_hint", other.tokens[k].text)), -1)
            text = self.say(other, *other.cut(opening + 1, other.partner[opening], ",")[-1], given).split(MARK)[0]
            if "hint:" not in text:
                return [text]
        return []

    @staticmethod
    def codes_in(source, low, high):
        """Returns the ExitCodes that [low, high) names."""
        names = [source.tokens[k + 2].text if source.is_name(k, "ExitCode") else "kErrno" for k in range(low, high)
                 if source.is_name(k, "ExitCode") and source.is_sign(k + 1, "::") or source.is_name(k, "exit_code_of_errno")]
        return tuple(dict.fromkeys(names))

    def errors(self):
        for path, text in self.texts.items():
            source = self.source(path) if "hint:" in text else None
            for i, token in enumerate(source.tokens if source else ()):
                for found in HINT.finditer(token.text) if token.kind == "text" else ():
                    if source.called(source.around[i])[1] == "find":
                        continue
                    low, high, _ = source.expression(i)
                    before, _, remedy = self.say(source, low, high, i).partition(found[0])
                    texts = list(dict.fromkeys(filter(None, map(tidy, self.texts_before(source, i, before)))))[:MOST_TEXTS]
                    reasons = source.errnos(i) if not before.strip(" .\n") else []
                    said = " — ".join(filter(None, (" / ".join(texts), ", ".join(os.strerror(getattr(errno, name)) for name in reasons))))
                    offset = token.places[found.start()]
                    yield Error(path, source.line(offset), offset, found[1] or "", self.code(source, i, reasons), said, tidy(remedy))

    def code(self, source, i, reasons):
        found = self.codes(source, i)
        if reasons and "kErrno" in found:
            of_reason = self.code_of_errno
            found = tuple(dict.fromkeys(of_reason.get(name, of_reason[""]) for name in reasons))
        return found if len(found) <= MOST_CODES else ()

    @functools.cached_property
    def code_of_errno(self):
        """Returns the table of exit_code_of_errno: {errno: ExitCode}, with "" for all other errnos."""
        source = self.source(CODE_OF_ERRNO)
        low, high = source.body("exit_code_of_errno")
        return {name: source.tokens[k + 2].text for k in range(low, high) if source.is_name(k, "ExitCode") for name in source.errnos(k) or [""]}


def tidy(text):
    return re.sub(r"^[ .]+(?=[ A-Z{])|[ .]+$", "", " ".join(text.replace(MARK, "{...}").split()))


# ----------------------------------------------------------------------------------------------------------------------------- Python


def python_text(node):
    """Returns the text of a string or f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "{...}"
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(value.value)
        else:
            names = [n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(value.value) if isinstance(n, (ast.Name, ast.Attribute))]
            names = [name.strip("_") for name in names if name not in ("self", "type", "__name__", "list", "len", "str")]
            parts.append("{" + (names[0] if names else "...") + "}")
    return "".join(parts)


def python_numbers(tree):
    """Returns the names of a module that are assigned an integer: {name: number}."""
    return {target.id: value.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
            for target, value in python_assigned(node) if isinstance(value, ast.Constant) and isinstance(value.value, int)}


def python_errors(path, text, imported=()):
    """Yields the errors of a module. `imported`: numbers from other modules, by name."""
    tree = ast.parse(text)
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    encoded = [line.encode() for line in text.splitlines(keepends=True)]
    place = lambda line, column: starts[line - 1] + len(encoded[line - 1][:column].decode())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in inside | documents
               and isinstance(getattr(node, "value", ""), str)]
    callers = {id(node.args[0]): node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args}
    numbers = {**dict(imported), **python_numbers(tree)}
    folder_codes = CODES_OF_FOLDERS.get(path.rpartition("/")[0])
    for node in sorted(strings, key=lambda node: (node.lineno, node.col_offset)):
        begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        said = python_text(node)
        for found, at in zip(HINT.finditer(said), HINT.finditer(re.sub(r'"\s+f?"', lambda gap: " " * 0 + gap[0], text[begin:end]))):
            before, _, remedy = said.partition(found[0])
            call = callers.get(id(node))
            codes = [getattr(code, "value", None) or numbers.get(getattr(code, "id", None)) for code in (call.args[1:] if call else ())]
            if not before.strip(" ."):
                before = next((python_text(other).rpartition("{")[0] for other in strings if python_text(other).endswith("{hint}")), "")
            offset = begin + at.start()
            called = getattr(getattr(call, "func", None), "id", None)
            usual = DEFAULT_CODES.get(called or "Error", ()) if called or not folder_codes else folder_codes
            codes = tuple(code for code in codes if code is not None) if folder_codes and not called else tuple(codes)
            yield Error(path, bisect.bisect_right(starts, offset), offset, found[1] or "", codes or usual, tidy(before), tidy(remedy))


def python_assigned(node):
    """Yields (name, value) of assignments such as `a = 1` and `a, b = 1, 2`."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from ((name, value) for name, value in zip(target.elts, node.value.elts) if isinstance(name, ast.Name))
        elif isinstance(target, ast.Name):
            yield target, node.value
