"""Reads values as the programs themselves read them, and converts values to texts.

Accelerate, for example, also accepts the texts "true" and "no" for a flag, and the text "3" for a number.
"""

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any

from tessera.import_config._documents import NUMBER

_EXACT = 2.0**53  # up to this number, a double holds every integer
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def word(value: Any) -> str:
    """Returns a text in lower case; "" if the value is no text."""
    return value.strip(" \t").lower() if isinstance(value, str) else ""


def boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else _FLAGS.get(word(value))


def number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number or NUMBER.fullmatch(word(value)) else None


def integer(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and abs(found) <= _EXACT and found == math.floor(found) else None


def names(value: Any) -> list[str] | None:
    """Returns the texts of a list, or of a text such as "a, b". Each text is returned once."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return None
    return list(dict.fromkeys(part.strip(" \t") for part in parts if part.strip(" \t")))


# These functions convert values to texts. Control characters of a file must not reach a terminal: JSON escapes them.

def dumped(value: Any, most: int = 200) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} bytes more)"


def quoted(text: str, most: int) -> str:
    return json.dumps(text[:most], ensure_ascii=False)[:-1] + ('..."' if len(text) > most else '"')


def dotted(pointer: str) -> str:
    return pointer[1:].replace("/", ".")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ". hint: did you mean ...?" with the nearest name, or a name with the same ending; "" if there is
    none."""
    by_lower, name = {each.lower(): each for each in known}, name.lower()[:100]
    near = difflib.get_close_matches(name, by_lower, 1, 0.8) or [each for each in by_lower if each.rpartition(".")[2] == name.rpartition(".")[2]]
    return f'. [T0699] hint: did you mean "{by_lower[near[0]]}"?' if near else ""
