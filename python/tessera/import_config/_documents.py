"""Reads JSON and YAML, in the forms in which people write them, into plain values.

A text that cannot be read raises an Error, which names the line and a remedy.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from tessera._error import Error

MOST_BYTES, MOST_VALUES, MOST_DEPTH = 1 << 18, 500, 32  # 500: about four times as many as the largest file in use has
CONFIG, UNAVAILABLE = 78, 69
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
_BLANKS = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_JSON_TEXT = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])", re.ASCII)
_JSON_WORD = re.compile(r"-?[A-Za-z_$][\w$.-]*")
_JSON_WORDS = {"true": True, "false": False, "null": None, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_YAML_WORDS = {**dict.fromkeys(["", "~", "null"]), **dict.fromkeys(["true", "yes", "on"], True), **dict.fromkeys(["false", "no", "off"], False),
               ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


def read(data: bytes, name: str) -> dict[str, Any]:
    """Returns the object in a file.

    `name` is the name of the file in errors. Its ending (".json", ".yaml") determines how the text is read. If it has
    no such ending, a text that begins with "{" is read as JSON, and any other text as YAML. JSON may have all that
    DeepSpeed accepts too: comments (// # /* */), a comma after the last member or no comma at the end of a line, keys
    without quotes, NaN and Infinity. YAML may have no aliases or tags, and needs the package PyYAML. Each key may be
    given only once. Raises Error (78).
    """
    source = _Source(data, name)
    start = _BLANKS.match(source.text).end()
    if not source.text.strip():
        source.fail(0, "the file is empty")
    is_json = name.endswith((".json", ".hjson")) or not name.endswith((".yaml", ".yml")) and source.text.startswith("{", start)
    root = (_Json(source) if is_json else _Yaml(source)).read()
    if source.problems:
        raise Error("\n".join(source.problems), CONFIG)
    if not isinstance(root, dict):
        got = f"a list of {len(root)}" if isinstance(root, list) else "nothing" if root is None else json.dumps(root)[:60]
        source.fail(start, f"must be an object with keys, got {got}")
    return root


def _number(text: str) -> float:
    value = float(text)
    return int(text) if _INTEGER.fullmatch(text) and abs(value) < 2**63 else value


class _Source:
    """A text, the problems found in it, and the number of values that may still be read."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self.text, self.problems, self.values_left = name, "", [], MOST_VALUES
        try:
            self.text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.text = data[:error.start].decode("utf-8-sig")
            self.fail(len(self.text), "not UTF-8: this is no text, or one in another encoding. [T0682] hint: iconv -t UTF-8 writes it anew")
        if "\0" in self.text:
            self.fail(self.text.index("\0"), "a NUL byte: this is not a text file. [T0683] hint: is it the right file?")

    def place(self, offset: int) -> str:
        """Returns "line:column", from 1."""
        return f"{self.text.count(chr(10), 0, offset) + 1}:{offset - self.text.rfind(chr(10), 0, offset)}"

    def line(self, offset: int, pointer: str, message: str) -> str:
        return f"{self.name}:{self.place(offset)}: {pointer[:200] or '/'}: {message}"

    def fail(self, offset: int, message: str, pointer: str = "") -> NoReturn:
        hint = "" if re.search(r"\bhint\b", message) else ". [T0684] hint: docs/import-config.md says which files are read"
        raise Error("\n".join([*self.problems, self.line(offset, pointer, message + hint)]), CONFIG)

    def take_value(self, offset: int, depth: int) -> None:
        self.values_left -= 1
        if self.values_left < 0:
            self.fail(offset, "more values than a file of this kind may have. [T0685] hint: is it the right file?")
        if depth > MOST_DEPTH:
            self.fail(offset, f"nested more than {MOST_DEPTH} deep. [T0686] hint: is it the right file?")

    def take_key(self, places: dict[str, int], key: str, offset: int, pointer: str) -> str:
        """Returns the pointer of the key's value. `places` has the offset at which each key of the same object was
        first given."""
        pointer += "/" + json.dumps(key, ensure_ascii=False)[1:-1].replace("~", "~0").replace("/", "~1")
        if places.setdefault(key, offset) != offset:
            self.problems.append(self.line(offset, pointer, f"given twice. [T0687] hint: remove one; the first is at {self.place(places[key])}"))
        return pointer


class _Json:
    def __init__(self, source: _Source) -> None:
        self.source, self.text, self.at = source, source.text, 0

    def read(self) -> Any:
        self.skip()
        root = self.value("", 0)
        self.skip()
        if self.at < len(self.text):
            self.fail("the end of the text", "")
        return root

    def is_at(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def skip(self) -> bool:
        """Skips blanks and comments. Returns whether a line ended there."""
        start, self.at = self.at, _BLANKS.match(self.text, self.at).end()
        if self.is_at("/*"):
            self.source.fail(self.at, "not JSON: this comment has no end. [T0688] hint: end it with */")
        return "\n" in self.text[start:self.at]

    def fail(self, wanted: str, pointer: str) -> NoReturn:
        word = _JSON_WORD.match(self.text, self.at)
        found = word[0][:40] if word else self.text[self.at:self.at + 1]
        if self.is_at("'") or found in ("True", "False", "None"):
            remedy = "[T0689] hint: this is a dict of Python, which json.dump writes as JSON: with double quotes, true, false and null"
        elif word:
            remedy = "[T0690] hint: a text stands in double quotes; those without, as Hjson has them, are not read"
        else:
            remedy = "[T0691] hint: is a comma, a quote or a bracket missing, here or before?"
        self.source.fail(self.at, f"not JSON: want {wanted}, got {json.dumps(found) if found else 'the end of the text'}. {remedy}", pointer)

    def value(self, pointer: str, depth: int) -> Any:
        self.source.take_value(self.at, depth)
        if self.is_at("{"):
            return self.members(pointer, depth)
        if self.is_at("["):
            return [self.value(f"{pointer}/{index}", depth + 1) for index in self.items("]", pointer)]
        if self.is_at('"'):
            return self.string(pointer)
        number, word = _JSON_NUMBER.match(self.text, self.at), _JSON_WORD.match(self.text, self.at)
        if not number and not (word and word[0] in _JSON_WORDS):
            self.fail("a value", pointer)
        self.at = (number or word).end()
        return _number(number[0]) if number else _JSON_WORDS[word[0]]

    def items(self, end: str, pointer: str) -> Iterator[int]:
        """Yields the index of each item while the reading position is before that item. When all items are read, the
        position is after `end`."""
        self.at += 1
        self.skip()
        index = 0
        while not self.is_at(end):
            yield index
            index += 1
            is_next_line = self.skip()
            if self.is_at(","):
                self.at += 1
                self.skip()
            elif not self.is_at(end) and (not is_next_line or self.at == len(self.text)):
                self.fail(f'"," or "{end}"', pointer)
        self.at += 1

    def members(self, pointer: str, depth: int) -> dict[str, Any]:
        result, places = {}, {}
        for _ in self.items("}", pointer):
            offset, word = self.at, _JSON_WORD.match(self.text, self.at)
            self.at = word.end() if word else self.at
            key = word[0] if word else self.string(pointer)
            inner = self.source.take_key(places, key, offset, pointer)
            self.skip()
            if not self.is_at(":"):
                self.fail('":"', inner)
            self.at += 1
            self.skip()
            result[key] = self.value(inner, depth + 1)
        return result

    def string(self, pointer: str) -> str:
        found = _JSON_TEXT.match(self.text, self.at)
        if found is None:
            self.fail('a text "..." on one line', pointer)
        try:
            text = json.loads(found[0])
            text.encode()
        except ValueError:
            self.source.fail(self.at, "not JSON: a backslash stands before what it cannot escape, or for half of a character. "
                             "[T0692] hint: write \\\\ for a backslash, and characters as they are", pointer)
        self.at = found.end()
        return text


class _Yaml:
    def __init__(self, source: _Source) -> None:
        self.source = source
        try:
            import yaml
        except ImportError as error:
            raise Error(f"{source.name}: YAML is read with the package PyYAML, which this Python does not have. [T0693] hint: pip install pyyaml",
                        UNAVAILABLE) from error
        self.yaml = yaml

    def read(self) -> Any:
        try:
            self.events = self.checked(self.yaml.parse(self.source.text, Loader=self.yaml.SafeLoader))
            roots = [self.node(event, "", 0) for event in self.events]
            return roots[0] if roots else None
        except self.yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            said = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
            self.fail(mark.index if mark else getattr(error, "position", 0), said)

    def fail(self, offset: int, message: str, pointer: str = "") -> NoReturn:
        self.source.fail(min(offset, len(self.source.text)), f"not YAML: {message}", pointer)

    def checked(self, events: Iterator[Any]) -> Iterator[Any]:
        """Checks the events of one document's values, and yields them."""
        documents = 0
        for event in events:
            offset = event.start_mark.index
            if isinstance(event, self.yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.fail(offset, "a second document: the file must have one")
            if isinstance(event, self.yaml.AliasEvent):
                self.fail(offset, "aliases (*name) are not read. [T0694] hint: write the value out")
            if getattr(event, "tag", None) not in (None, "!"):
                self.fail(offset, "tags (!name) are not read. [T0695] hint: leave it out")
            if isinstance(event, self.yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
                self.fail(offset, "an escape is half of a character. [T0696] hint: write the character itself")
            if isinstance(event, (self.yaml.NodeEvent, self.yaml.CollectionEndEvent)):
                yield event

    def node(self, event: Any, pointer: str, depth: int) -> Any:
        self.source.take_value(event.start_mark.index, depth)
        if isinstance(event, self.yaml.ScalarEvent):
            return _plain(event.value) if event.style is None and event.tag is None else event.value
        if isinstance(event, self.yaml.SequenceStartEvent):
            return [self.node(each, f"{pointer}/{index}", depth + 1) for index, each in enumerate(self.until_end())]
        result, places = {}, {}
        for key in self.until_end():
            if not isinstance(key, self.yaml.ScalarEvent):
                self.fail(key.start_mark.index, "a key must be a word, not a list or a mapping", pointer)
            inner = self.source.take_key(places, key.value, key.start_mark.index, pointer)
            result[key.value] = self.node(next(self.events), inner, depth + 1)
        return result

    def until_end(self) -> Iterator[Any]:
        for event in self.events:
            if isinstance(event, self.yaml.CollectionEndEvent):
                return
            yield event


def _plain(text: str) -> Any:
    """Returns the value of a word without quotes."""
    if text.lower() in _YAML_WORDS and text in (text.lower(), text.capitalize(), text.upper(), "." + text[1:].capitalize()):
        return _YAML_WORDS[text.lower()]
    return _number(text) if NUMBER.fullmatch(text) else text
