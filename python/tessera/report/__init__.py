"""Draws runs of `tessera train`: one HTML page with curves, tables and a column for each run.

    python -m tessera.report runs/a runs/b --out report.html

A run is a folder that `tessera train --out` made, or a file that `--metrics` wrote (JSON lines, docs/metrics.md). The page
needs no network and no other file. Drawing needs matplotlib: pip install 'tessera_train[report]'.
"""

from tessera.report._page import page
from tessera.report._runs import Latency, Run, read_run

__all__ = ["Latency", "Run", "page", "read_run"]
