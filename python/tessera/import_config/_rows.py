"""Defines the kinds of rows that tables are made of. Each key of another program has one row.

A new key needs only a row: the command, the list of known keys, and docs/import-config.md then have the key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tessera.import_config._session import Key, Session
from tessera.import_config._values import boolean, did_you_mean, dotted, dumped, number, word

Rule = Callable[[Key], None]


class Row(NamedTuple):
    """One key of another program. `apply` decides once what happens to the key; it is never called for null or
    "auto"."""

    name: str  # Key.name; "amp.*" stands for all keys below "amp" that have no row of their own
    doc: str  # text for the page that says how the key is handled
    apply: Rule
    shown: str = ""  # name in the file, for the page and errors; empty: `name`

    def title(self) -> str:
        return self.shown or self.name


class Format(NamedTuple):
    """A kind of file."""

    name: str  # the format's name for --format
    title: str
    heading: str  # heading of its part of the page
    rows: list[Row]
    row_name: Callable[[str], str]  # converts Key.path to Key.name
    finish: Callable[[Session], None]  # a function that runs after all rows and sets keys that the file leaves out

    def row_of(self, name: str) -> Row | None:
        """Returns the row with this name, or else the row of the innermost section around it. Returns None if the key
        is unknown."""
        found = [row for row in self.rows if row.name == name or row.name.endswith(".*") and name.startswith(row.name[:-1])]
        return max(found, key=lambda row: (row.name == name, len(row.name)), default=None)


def rule(name: str, doc: str, apply: Rule) -> list[Row]:
    return [Row(name, doc, apply)]


def ignores(keys: str, why: str) -> list[Row]:
    """Makes a row for each of `keys`. Their values do not change training."""
    return [Row(name, f"ignored: {why}", lambda key: key.ignored(why)) for name in keys.split()]


def refuses(keys: str, refusal: str) -> list[Row]:
    return [Row(name, f"refused: {refusal}", lambda key: key.refused(refusal)) for name in keys.split()]


def expects(keys: str, value: Any, why: str, refusal: str) -> list[Row]:
    """Makes a row for each of `keys`. A key must be `value`, since Tessera has no other behaviour. `why` describes this
    behaviour. Any other value is refused."""
    read = boolean if isinstance(value, bool) else word if isinstance(value, str) else number
    return [Row(name, f"`{dumped(value)}`: ignored, {why}; else refused: {refusal}",
                lambda key: key.ignored(why) if read(key.value) == value else key.refused(refusal)) for name in keys.split()]


def sets(name: str, pointer: str) -> list[Row]:
    """Makes a row for a number, or a list of two numbers, that becomes a key of the strategy."""
    return rule(name, f"`{dotted(pointer)}`", lambda key: key.put_number(pointer))


def flag(name: str, pointer: str) -> list[Row]:
    """Makes a row for a boolean that becomes a key of the strategy."""
    return rule(name, f"`{dotted(pointer)}`", lambda key: (
        key.refused("must be true or false") if boolean(key.value) is None else key.put(pointer, boolean(key.value))))


def switched_off(section: str, refusal: str) -> list[Row]:
    """Makes a row for a section that has an effect only if its key "enabled" is true. The value true is refused."""
    def apply(key: Key) -> None:
        if not key.session.is_on(f"{section}.enabled"):
            return key.ignored(f"{section} is not enabled")
        key.refused(refusal if key.name == f"{section}.enabled" else f"belongs to {section}")
    return rule(f"{section}.*", f"ignored unless `enabled` is true; then refused: {refusal}", apply)


def below(section: str, *parts: list[Row]) -> list[Row]:
    """Returns all rows of `parts`, with the section put in front of their names."""
    return [row._replace(name=section + row.name) for part in parts for row in part]


def guarded(guard: Callable[[Key, Rule], None], rows: list[Row]) -> list[Row]:
    """Makes rows whose keys have an effect only under a condition: `guard` decides about the key itself, or calls the
    row's rule."""
    return [row._replace(apply=lambda key, apply=row.apply: guard(key, apply)) for row in rows]


OF_THE_DEVICE = "with `--device gpu`; ignored with `--device cpu`; else refused, as it depends on the device that trains"


def to_host(key: Key, apply: Rule) -> None:
    """Applies the rule of a key that moves something from a GPU to its host's memory. The rule is applied only if the
    device is a GPU."""
    if key.session.device == "gpu":
        apply(key)
    elif key.session.device == "cpu":
        key.ignored("it has no effect: the CPU trains, and its memory is the host's already")
    else:
        key.refused("what it means depends on the device that trains. [T0697] hint: say which, by --device cpu or --device gpu, or in Python by device=")


def put_second_copy(key: Key, ranks: int, strategy: str) -> None:
    """Sets "strategy" to `strategy`, and adds a second copy of the parameters, which `ranks` neighbours share."""
    key.put("/secondary/ranks", ranks, f'secondary.form = "plain", strategy = "{strategy}"')
    if "/secondary/ranks" in key.session.settings:
        key.session.settings |= {"/secondary/form": "plain", "/strategy": strategy}


def apply_rows(form: Format, session: Session) -> None:
    """Calls the rules of the rows for the session's keys. Keys whose value is "auto" or null are ignored, and unknown
    keys are refused."""
    seen: dict[str, Key] = {}
    for key in session.keys:
        first = seen.setdefault(key.name, key)
        if first is key:
            _apply_row(form, key)
        elif first.value == key.value:
            key.ignored(f"{first.path} says the same")
        else:
            key.refused("the file says this twice, under two names. Keep one of them")
    form.finish(session)
    if session.device == "gpu":
        session.imply("/comm/transport", "nccl", "--device gpu: with it the module is trained there")
    if any(word(key.value) == "auto" for key in session.keys):
        session.notes.append(
            'What is "auto" is filled in by the training program, and left at Tessera\'s default here. TesseraTrainer takes accumulation, clipping, '
            "learning rate and schedule from TrainingArguments; the rest, such as mixed_precision, belongs into the strategy.")


def _apply_row(form: Format, key: Key) -> None:
    row = form.row_of(key.name)
    names_section = any(each.name.startswith(f"{key.name}.") for each in form.rows)
    if row is None and not names_section:
        near = did_you_mean(key.path, [each.title() for each in form.rows if not each.title().endswith(".*")])
        key.refused("unknown key" + (near or ". [T0698] hint: docs/import-config.md lists all; --skip-refused leaves it out"))
    elif key.value is None:
        key.ignored("null: nothing is said")
    elif key.value == {} and names_section:
        key.ignored("an empty section: nothing is said")
    elif row is None:
        key.refused("must be an object with keys of its own")
    elif word(key.value) == "auto":
        key.ignored("\"auto\": left at Tessera's default")
    else:
        row.apply(key)
