"""python -m tessera.import_config: translates a configuration of DeepSpeed, Accelerate or FSDP into a strategy file.

The strategy is written to stdout or --out, and the report on each key to stderr. Exit codes are those of sysexits.h
(tessera.Error).
"""

import argparse
import os
import select
import stat
import sys

from tessera._error import Error
from tessera._files import CORRUPT, MISSING, Parser, code_of, exit_code_after, expect_free, print_all, write_whole
from tessera.import_config import FORMATS, Translated, translate
from tessera.import_config._documents import CONFIG, MOST_BYTES
from tessera.import_config._session import IGNORED, MAPPED, REFUSED, setting_text

_PIPE_SECONDS = 3
_MOST_NAMED = 20  # largest number of refused keys that the last line names
_PREFIX = {MAPPED: "", IGNORED: "ignored: ", REFUSED: "REFUSED: "}


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m tessera.import_config", allow_abbrev=False,
                     description="A configuration of DeepSpeed, Accelerate or FSDP as a strategy file (docs/import-config.md).")
    parser.add_argument("file", help="JSON or YAML")
    parser.add_argument("--format", choices=list(FORMATS), default="", help="default: the keys tell")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="", help="what will train, for files that move something to the host's memory")
    parser.add_argument("--out", help="strategy file; default: stdout")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists; otherwise it is kept, an error")
    parser.add_argument("--skip-refused", action="store_true", help="leave out keys that the strategy cannot say")
    arguments = parser.parse_args(words)
    for name, value in (("file", arguments.file), ("--out", arguments.out)):
        if value == "":
            parser.error(f"argument {name}: must not be empty")
    return arguments


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() + "\n" for line in lines)


def _report(translated: Translated, name: str) -> str:
    rows = [(key.path, key.value, _PREFIX[key.fate] + key.text) for key in translated.keys]
    text = f"{name} is {translated.title}\n\n" + _table(("key", "value", "what became of it"), rows) + "\n"
    if translated.implied:
        rows = [(setting_text(each.pointer, each.value), each.why) for each in translated.implied]
        text += _table(("also set, as the file leaves it to a default", "why"), rows) + "\n"
    text += "".join(f"note: {note}\n" for note in translated.notes)
    counts = ", ".join(f"{sum(key.fate == fate for key in translated.keys)} {fate}" for fate in _PREFIX)
    return f"{text}keys: {counts}\n"


def _read(path: str) -> bytes:
    """Reads a regular file, or a pipe to which a process writes."""
    hint = "[T0674] hint: name a configuration of DeepSpeed, Accelerate or FSDP (docs/import-config.md)"
    try:
        file, data = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), b""
        try:
            mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
                raise Error(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'a device or socket'}, want a regular file. {hint}", CORRUPT)
            while len(data) <= MOST_BYTES:
                if stat.S_ISFIFO(mode) and not select.select([file], [], [], _PIPE_SECONDS)[0]:
                    raise Error(f"{path} is a pipe that nobody wrote to for {_PIPE_SECONDS} s. {hint}", CORRUPT)
                more = os.read(file, MOST_BYTES + 1 - len(data))
                if not more:
                    return data
                data += more
        finally:
            os.close(file)
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}. {hint}", code_of(error, MISSING)) from error
    raise Error(f"{path}:1:1: /: larger than 256.00 KiB: this is no configuration. {hint}", CONFIG)


def _import(options: argparse.Namespace) -> None:
    text = _read(options.file)
    if options.out:
        expect_free(options.out, "the configuration", [options.file], options.overwrite)
    translated = translate(text, options.file, options.format, options.device)
    refused = translated.refused
    sys.stderr.write(_report(translated, options.file))
    names = ", ".join(refused[:_MOST_NAMED]) + (f" and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else "")
    if refused and not options.skip_refused:
        raise Error(f"{options.file}: no strategy is written, since keys are refused: {names}. "
                    "[T0680] hint: change them as the table says, or leave them "
                    "out with --skip-refused", CONFIG)
    if refused:
        sys.stderr.write(f"left out, since they are refused: {names}\n")
    if not translated.strategy:
        raise Error(f"{options.file}: without the refused keys the strategy would contradict itself. "
                    "[T0681] hint: change them as the table says", CONFIG)
    if options.out:
        write_whole(options.out, translated.strategy)
    else:
        print_all(translated.strategy)


def main(words: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code_after(lambda: _import(_arguments(words)))


if __name__ == "__main__":
    sys.exit(main())
