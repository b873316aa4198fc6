"""Holds one file during its translation: its keys, how each of them was handled, and the resulting settings."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tessera import _native
from tessera._error import Error
from tessera.import_config._values import boolean, dotted, dumped, integer, number, quoted, word

MAPPED, IGNORED, REFUSED = "mapped", "ignored", "refused"


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for pointer, value in settings.items():
        *groups, name = pointer[1:].split("/")
        place = root
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return root


def flat(values: dict[str, Any], pointer: str = "") -> dict[str, Any]:
    """Returns the values of a resolved strategy by pointer, in the order of the strategy's keys."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{pointer}/{name}") if isinstance(value, dict) else {f"{pointer}/{name}": value}
    return result


DEFAULTS = flat(json.loads(_native.Strategy.from_json("{}", "strategy").to_json()))


def _problem_of(pointer: str, value: Any) -> str:
    """Returns the problem that the reader of strategies finds in a value's type or range; "" if the value is valid."""
    try:
        _native.Strategy.from_json(json.dumps(nested({pointer: value}), allow_nan=False), "strategy")
    except ValueError:
        return "must be a finite number"
    except Error as error:
        found = re.search(rf"^strategy:\d+:\d+: {pointer}(?:/\d+)?: (must be .*)$", str(error), re.MULTILINE)
        return found[1] if found else ""
    return ""


class Fate(NamedTuple):
    """How a key of the file was handled."""

    path: str
    value: str  # JSON, cut if it is long
    fate: str
    text: str  # 'strategy = "FULL_SHARD"', or the reason why the key was ignored or refused


class Implied(NamedTuple):
    """A key of the strategy that is set although no key of the file sets it, because the other program's default
    differs from Tessera's."""

    pointer: str
    value: Any
    why: str


class Key:
    """A key of the file that holds a value. An object contains keys and does not count as a key itself, unless it is
    empty."""

    def __init__(self, session: "Session", path: str, name: str, value: Any) -> None:
        self.session = session
        self.path = path  # name in the file: "fsdp_config.fsdp_version"
        self.name = name  # name in rows: "fsdp.version"
        self.value = value

    def mapped(self, text: str) -> None:
        self._decide(MAPPED, text)

    def ignored(self, why: str) -> None:
        self._decide(IGNORED, why)

    def refused(self, why: str) -> None:
        self._decide(REFUSED, why)

    def put(self, pointer: str, value: Any, more: str = "", *, also: str = "") -> None:
        """Sets a key of the strategy, and the key `also` to the same value. The report has the settings, then `more`.

        A value that the key does not allow is refused instead.
        """
        if problem := _problem_of(pointer, value):
            return self.refused(f"{dotted(pointer)} {problem}")
        value = int(value) if type(DEFAULTS[pointer]) is int else value
        self.mapped(". ".join(part for part in (setting_text(pointer, value), also and setting_text(also, value), more) if part))
        self.session.settings |= {each: value for each in (pointer, also) if each}

    def put_number(self, pointer: str, more: str = "", *, also: str = "") -> None:
        """Sets a key to the file's own number. A value that is no number is refused."""
        self.put(pointer, self.value if number(self.value) is None else number(self.value), more, also=also)

    def _decide(self, fate: str, text: str) -> None:
        whole = integer(self.value) if isinstance(self.value, float) else None
        shown = quoted(self.value, 60) if isinstance(self.value, str) else dumped(self.value if whole is None else whole, 60)
        self.session.fates.append(Fate(quoted(self.path, 100)[1:-1], shown, fate, text))


def setting_text(pointer: str, value: Any) -> str:
    """Returns a text such as "optimizer.lr = 0.001"."""
    return f"{dotted(pointer)} = {dumped(value)}"


class Session:
    """The state that rows share. A row finds other keys here, so their order in the file does not matter."""

    def __init__(self, keys: Sequence[tuple[str, str, Any]], device: str) -> None:
        self.device = device  # device that will train: "cpu", "gpu", or "" if unknown
        self.keys = [Key(self, *key) for key in keys]
        self.settings: dict[str, Any] = {}  # settings by pointer
        self.fates: list[Fate] = []
        self.implied: list[Implied] = []
        self.notes: list[str] = []
        self._values = {key.name: key.value for key in reversed(self.keys) if key.value is not None}

    def find(self, name: str) -> Any:
        """Returns the value of the key that rows call `name`; None if the file does not have this key, or its value is
        null."""
        return self._values.get(name)

    def is_on(self, name: str) -> bool:
        return boolean(self.find(name)) is True

    def is_auto(self, name: str) -> bool:
        return word(self.find(name)) == "auto"

    def imply(self, pointer: str, value: Any, why: str) -> None:
        """Sets a key of the strategy that no key of the file sets, unless it was set before."""
        if pointer not in self.settings:
            self.settings[pointer] = value
            self.implied.append(Implied(pointer, value, why))
