"""python -m tessera.report: makes one HTML page from run directories.

Exit codes are those of sysexits.h (tessera.Error).
"""

import argparse
import os
import sys

from tessera._files import Parser, exit_code_after, expect_free, print_all, write_whole
from tessera.report import page, read_run


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m tessera.report", allow_abbrev=False, description="Draws runs of tessera train, side by side, as one HTML page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory of tessera train --out, or a file of --metrics (JSON lines)")
    parser.add_argument("--out", help="the page; default: report.html in the first run's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a page that exists; otherwise it is kept, an error")
    return parser.parse_args(words)


def _report(options: argparse.Namespace) -> None:
    first = options.runs[0]
    out = options.out or os.path.join(first if os.path.isdir(first) else os.path.dirname(first), "report.html")
    expect_free(out, "the run", options.runs, options.overwrite)
    text = page([read_run(path) for path in options.runs])
    write_whole(out, text)
    print_all(f"{out}: {len(options.runs)} run{'s' if len(options.runs) > 1 else ''}\n")


def main(words: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code_after(lambda: _report(_arguments(words)))


if __name__ == "__main__":
    sys.exit(main())
