"""Translates configurations of DeepSpeed, Accelerate and FSDP into strategies, and reports how each key was handled.

    import tessera.import_config
    translated = tessera.import_config.translate(text, "ds_config.json")
    engine = tessera.Engine(model, json.loads(translated.strategy))

A key is either translated, ignored because it means nothing here, or refused. `python -m tessera.import_config FILE`
does the same on a command line. docs/import-config.md lists every key.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tessera import _native
from tessera._error import Error
from tessera.import_config import _accelerate, _deepspeed, _fsdp
from tessera.import_config._documents import CONFIG, read
from tessera.import_config._rows import Format, apply_rows
from tessera.import_config._session import DEFAULTS, REFUSED, Fate, Implied, Session, flat, nested

__all__ = ["FORMATS", "Fate", "Implied", "Translated", "translate"]

FORMATS: dict[str, Format] = {form.name: form for form in (_deepspeed.FORMAT, _accelerate.FORMAT, _fsdp.FORMAT)}
# Numbers whose defaults depend on the rule and have changed between versions. A translated strategy always gives them.
_DEFAULTS_OF_RULES = {"/optimizer/lr", "/optimizer/betas", "/optimizer/eps", "/optimizer/weight_decay"}


class Translated(NamedTuple):
    """The result of `translate`: the translation of another program's configuration."""

    title: str
    """"a DeepSpeed configuration" """
    keys: list[Fate]
    """every key of the file once, in its order"""
    implied: list[Implied]
    notes: list[str]
    strategy: str
    """JSON of the keys that differ from their defaults, in the order of docs/strategy.md. It is "" if the rest would
    contradict itself without the refused keys"""

    @property
    def refused(self) -> list[str]:
        """Returns the paths of the refused keys."""
        return [key.path for key in self.keys if key.fate == REFUSED]


def translate(text: str | bytes, name: str = "configuration", format: str = "", device: str = "") -> Translated:
    """Translates the text of a file and reports how each key was handled.

    `name` is the name of the file in errors. Its extension (".json", ".yaml") determines how the text is read. If it
    has no such extension, a text that begins with "{" is read as JSON, and any other text as YAML. `format` is one of
    FORMATS; if it is "", the format is found from the keys. `device` is the device on which the training will run,
    "cpu" or "gpu". It is needed if the file moves something to the host's memory.

    Raises Error: 78 if the text cannot be read, or if the file is of no known kind; 78 if no key was refused and the
    strategy would contradict itself; 64 if the format or the device is unknown; 69 for YAML without PyYAML.
    """
    for argument, given, known in (("format", format, list(FORMATS)), ("device", device, ["cpu", "gpu"])):
        if given and given not in known:
            raise Error(f"translate: there is no {argument} {given!r}. [T0670] hint: it is one of {', '.join(known)}, or \"\"")
    keys = list(_keys_of(read(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, name)))
    # If a file has only "fsdp_config", the formats of Accelerate and transformers both have all its keys. But
    # Accelerate reads no file without distributed_type.
    form = FORMATS[format] if format else max(FORMATS.values(), key=lambda each: (_known_keys(each, keys), each is _fsdp.FORMAT))
    if not format and not _known_keys(form, keys):
        raise Error(f"{name}:1:1: no key of this file is one of DeepSpeed's, Accelerate's or FSDP's. "
                    "[T0671] hint: say which kind of file it is, by --format, or in Python by format=",
                    CONFIG)
    session = Session([(path, form.row_name(path), value) for path, value in keys], device)
    apply_rows(form, session)
    result = Translated(form.title, session.fates, session.implied, session.notes, "")
    try:
        return result._replace(strategy=_strategy_of(session, name))
    except Error as error:
        if result.refused:
            return result
        raise Error(f"{error}\n"
                    f"[T0672] hint: these keys of the strategy contradict each other. Change what they come from in {name}", CONFIG) from None


def _keys_of(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from _keys_of(value, inner)
        else:
            yield inner, value


def _known_keys(form: Format, keys: list[tuple[str, Any]]) -> int:
    return sum(form.row_of(form.row_name(path)) is not None for path, _ in keys)


def _strategy_of(session: Session, name: str) -> str:
    """Returns the strategy as the reader of strategies resolves it."""
    read_back = _native.Strategy.from_json(json.dumps(nested(session.settings)), f"the strategy of {name}")
    written = {pointer: value for pointer, value in flat(json.loads(read_back.to_json())).items()
               if pointer in session.settings and (pointer in _DEFAULTS_OF_RULES or value != DEFAULTS[pointer])}
    return json.dumps(nested(written), indent=2, ensure_ascii=False) + "\n"
