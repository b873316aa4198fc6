"""Reads C++ sources as tokens. The class Cpp finds the partner of a bracket, and the text, the call and the function
around a token.

This module understands only those parts of C++ that error_texts.py needs to find an error's text. The sources are
formatted by clang-format, and have few macros.
"""

import bisect
import dataclasses
import errno
import functools
import re

TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)|(?P<raw>R"(?P<d>[^(\s]*)\(.*?\)(?P=d)")|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<char>'(?:[^'\\\n]|\\.)+')|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.']*)|(?P<sign>::|->|<<|&&|\|\||[=!<>+-]=|.)""", re.S)
ESCAPES = {"n": "\n", "t": "\t", "0": "\0"}
PAIRS = {"(": ")", "[": "]", "{": "}"}
# Functions that make a text from all of their arguments (SAYS_ALL), or from the first one (SAYS_FIRST).
SAYS_ALL, SAYS_FIRST = {"str", "StrCat"}, {"format", "string", "move", "say"}
CHECKS = {"expect": "kUsage", "TORCH_CHECK": "kInternal"}  # an error's text begins at argument 2 of these
NO_FUNCTION = {"if", "for", "while", "switch", "catch", "return", ""}


@dataclasses.dataclass(slots=True)
class Token:
    kind: str
    text: str  # a literal's text without quotes; adjacent literals count as one
    start: int
    places: list  # position of each character of a literal


def tokens_of(source):
    tokens = []
    for found in TOKEN.finditer(source):
        kind = found.lastgroup
        if kind == "blank":
            continue
        if kind != "text":
            tokens.append(Token(kind, found.group(), found.start(), []))
            continue
        said, begin = found.group()[1:-1], found.start() + 1
        places = list(range(begin, begin + len(said)))
        if "\\" in said:
            parts = list(re.finditer(r"\\(.)|.", said, re.S))
            said = "".join(ESCAPES.get(part[1], part[1]) if part[1] else part[0] for part in parts)
            places = [begin + part.start() for part in parts]
        if tokens and tokens[-1].kind == "text":
            tokens[-1].text += said
            tokens[-1].places += places
        else:
            tokens.append(Token("text", said, found.start(), places))
    return tokens


class Cpp:
    """A source as tokens. `partner`: the bracket that belongs to a bracket. `around`: the bracket in which a token stands, or -1."""

    def __init__(self, path, text):
        self.path, self.tokens = path, tokens_of(text)
        self.line_ends = [found.start() for found in re.finditer("\n", text)]
        self.rest_of = functools.cache(self.find_rest)
        self.partner, self.around, open_ones = {}, [], []
        for i, token in enumerate(self.tokens):
            if token.kind == "sign" and token.text in PAIRS.values() and open_ones:
                begin = open_ones.pop()
                self.partner[i], self.partner[begin] = begin, i
            self.around.append(open_ones[-1] if open_ones else -1)
            if token.kind == "sign" and token.text in PAIRS:
                open_ones.append(i)

    def line(self, offset):
        return bisect.bisect_left(self.line_ends, offset) + 1

    def is_sign(self, i, *texts):
        return 0 <= i < len(self.tokens) and self.tokens[i].kind == "sign" and self.tokens[i].text in texts

    def is_name(self, i, *texts):
        return 0 <= i < len(self.tokens) and self.tokens[i].kind == "name" and (not texts or self.tokens[i].text in texts)

    def called(self, bracket):
        """Returns the first token and the last name of the expression before a bracket: `a.b::c<T>(` gives (the token
        `a`, "c")."""
        last = bracket - 1
        if self.is_sign(last, ">"):
            while last > 0 and not self.is_sign(last, "<"):
                last -= 1
            last -= 1
        if not self.is_name(last):
            return bracket, ""
        first = last
        while self.is_sign(first - 1, "::", ".", "->") and self.is_name(first - 2):
            first -= 2
        return first, self.tokens[last].text

    def cut(self, low, high, *signs):
        """Cuts [low, high) at those `signs` that are in no inner bracket, and returns the parts."""
        pieces, begin, i = [], low, low
        while i < high:
            if self.is_sign(i, *PAIRS):
                i = self.partner.get(i, i)
            elif self.is_sign(i, *signs):
                pieces.append((begin, i))
                begin = i + 1
            i += 1
        return [*pieces, (begin, high)]

    def argument(self, i):
        """Returns (low, high) of the argument, element or statement that contains token i."""
        bracket = self.around[i]
        is_block = bracket < 0 or self.is_sign(bracket, "{") or self.called(bracket)[1] in NO_FUNCTION - {""}
        ends = (",", ";") if is_block else (",",)
        low = i
        while low - 1 > bracket and not self.is_sign(low - 1, *ends):
            if is_block and self.is_sign(low - 1, "}"):
                break
            low = self.partner.get(low - 1, low - 1)
        high = i
        while high < len(self.tokens) and not self.is_sign(high, *ends, *PAIRS.values()):
            high = self.partner.get(high, high) + 1
        return low, high

    def expression(self, i):
        """Returns (low, high, call) of the whole text that contains token i. `call`: the bracket of the function that
        takes it, or -1."""
        low, high = self.argument(i)
        call = self.around[i]
        while self.is_sign(call, "(") and self.called(call)[1] not in NO_FUNCTION - {""}:
            first, name = self.called(call)
            rest = 1 if name in CHECKS else self.rest_of(name)
            if rest is not None:
                pieces = self.cut(call + 1, self.partner[call], ",")
                return pieces[min(rest, len(pieces) - 1)][0], self.partner[call], call
            if name and name not in SAYS_ALL | SAYS_FIRST:
                return low, high, call
            low, high = self.argument(first)
            i, call = first, self.around[first]
        for k in range(i, low - 1, -1):
            if (self.is_name(k, "return", "throw") or self.is_sign(k, "=", "+=")) and self.around[k] == call:
                return k + 1, high, call
        return low, high, call

    def find_rest(self, name):
        """Returns the position of the parameter `const Text&... text` of a function of this source, or None."""
        for i, token in enumerate(self.tokens if name else ()):
            if token.kind == "name" and token.text == name and self.body_at(i) and self.is_sign(i + 1, "("):
                parameters = self.cut(i + 2, self.partner[i + 1], ",")
                if self.is_sign(parameters[-1][1] - 2, ".") and self.is_sign(parameters[-1][1] - 3, "."):
                    return len(parameters) - 1
        return None

    def function(self, i):
        """Returns (name, token) of the function or named lambda that contains token i. Returns ("", -1) outside of all
        functions."""
        bracket = self.around[i]
        while bracket >= 0:
            end = bracket - 1
            while self.is_name(end) or self.is_sign(end, "::", "->", ">", "<", "*", "&"):
                end -= 1
            if self.is_sign(bracket, "{") and self.is_sign(end, ")"):
                first, name = self.called(self.partner[end])
                if name not in NO_FUNCTION:
                    return name, self.partner[end] - 1
                if self.is_sign(first - 1, "]") and self.is_sign(self.partner[first - 1] - 1, "="):
                    return self.tokens[self.partner[first - 1] - 2].text, self.partner[first - 1] - 2
            bracket = self.around[bracket]
        return "", -1

    def body(self, name):
        """Returns the numbers of the tokens { and } around the body of the function or lambda `name`, or None."""
        return next(filter(None, (self.body_at(i) for i, token in enumerate(self.tokens) if token.kind == "name" and token.text == name)), None)

    def body_at(self, i):
        """Returns the body of the function or lambda whose name is token i."""
        opening = self.partner[i + 2] + 1 if self.is_sign(i + 1, "=") and self.is_sign(i + 2, "[") else i + 1
        if not self.is_sign(opening, "("):
            return None
        end = self.partner.get(opening, opening) + 1
        while self.is_name(end) or self.is_sign(end, "::", "->", "<", ">"):
            end += 1
        return (end, self.partner[end]) if self.is_sign(end, "{") and end in self.partner else None

    def errnos(self, i):
        """Returns the errnos among the `case` labels of the `return` that contains token i, such as ["ENOENT"]."""
        begin = self.function(i)[1]
        while i > begin and not self.is_name(i, "case", "default"):
            i -= 1
        names = []
        while self.is_name(i, "case") and self.is_name(i + 1):
            names.append(self.tokens[i + 1].text)
            i -= 3
        return [name for name in reversed(names) if hasattr(errno, name)]
