"""The page has a table of all runs side by side, charts, and each run's tables of stragglers and latencies, if it has
any.

A chart has a curve for each run. A curve of more than `_MOST_POINTS` steps is drawn through means of several steps.
Charts are SVG inside the page. Their lines use the page's colours, so they can be read on a dark page too.
"""

import html
import io
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tessera._error import Error
from tessera.report._runs import Latency, Run

_MOST_POINTS = 600
_MOST_BARS = 60
_LEAST_MS = 1e-3  # the axis of latencies is logarithmic, and begins here
_TAIL = 10  # number of last steps whose mean is shown as the end value of a run
_LINES = ("#2f6fb0", "#c2571a", "#4e8a3a", "#8a5aab", "#a8324a", "#0a8f8f", "#8a6d1f", "#6f7680")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_LOOK = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "legend.frameon": False, "text.parse_math": False}
_UNAVAILABLE = 69
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #16181c; --soft: #50555c; --rule: #c9ccd1; }
@media screen and (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e6e6e6; --soft: #b4b8be; --rule: #44484f; } }
body { font: 15px/1.5 system-ui, "Liberation Sans", sans-serif; color: var(--ink); background: var(--page); max-width: 1000px;
  margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.8em 0 .3em; } p { margin: .4em 0; max-width: 46em; color: var(--soft); }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { text-align: left; border-bottom: 1px solid var(--rule); padding: 3px 14px 3px 0; vertical-align: bottom; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; color: var(--ink); font-family: inherit; }
"""


class _Chart(NamedTuple):
    title: str
    key: str
    """field of a step (docs/metrics.md)"""
    unit: str
    text: str = ""
    scale: float = 1.0
    beside: str = ""
    """a field that is drawn as a thin line beside it"""
    beside_label: str = ""


_CHARTS = (
    _Chart("Loss", "loss", "loss", "Marks are evaluations on held-out data."),
    _Chart("Norm of the gradients", "grad_norm", "norm", "The norm is taken before clipping."),
    _Chart("Learning rate", "lr", "rate"),
    _Chart("Speed", "tokens_per_second", "tokens a second", "All ranks together."),
    _Chart("Seconds a step", "seconds", "s", "The thin line is the 95th percentile of the last 100 steps.", beside="seconds_p95", beside_label="p95"),
    _Chart("Share of communication", "communication_share", "%", "The part of rank 0's time in collectives, waiting for other ranks included.", 100.0),
    _Chart("Seconds waited for data", "data_seconds", "s", "The part of a step before the first operator that uses a parameter."),
    _Chart("Seconds waited for the slowest rank", "waited_for_seconds", "s", "How much less than the slowest rank the others were busy, on average."),
    _Chart("Model FLOP/s utilization", "mfu", "%", "The share of the device's peak that the model's operators reach.", 100.0),
    _Chart("Memory of a rank", "bytes_allocated", "MiB", "The thin line is the plan.", 1 / 2**20, "bytes_planned", "plan"),
    _Chart("Waits for the disk", "disk_wait_seconds", "s", "The time in which training stood still for offloaded state."),
)


def _figures():
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Error("drawing needs matplotlib, which is not installed. [T0797] hint: pip install 'tessera_train[report]', or pip install matplotlib",
                    _UNAVAILABLE) from error
    return matplotlib, Figure


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Returns at most _MOST_POINTS points. Each point is the mean over equally many neighbouring steps. The last point
    may have fewer steps."""
    width = math.ceil(len(points) / _MOST_POINTS)
    if width <= 1:
        return list(points)
    groups = [points[begin:begin + width] for begin in range(0, len(points), width)]
    return [(statistics.fmean(x for x, _ in group), statistics.fmean(y for _, y in group)) for group in groups]


def _finite(points: list[tuple[int, float]], scale: float) -> list[tuple[int, float]]:
    return [(step, value * scale) for step, value in points if math.isfinite(value)]


def _svg(matplotlib: Any, figure: Any) -> str:
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tessera"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text)
    # Text and axes are black in the file; the text color of the page (`currentColor`) replaces black.
    return text.replace("#000000", "currentColor").replace("<text ", '<text fill="currentColor" ')


def _chart(chart: _Chart, runs: Sequence[Run]) -> str:
    """Returns the chart's section. It is empty if no run has the numbers, or if all numbers are 0."""
    matplotlib, make = _figures()
    curves = [_finite(run.column(chart.key), chart.scale) for run in runs]
    if not any(value != 0 for points in curves for _, value in points):
        return ""
    with matplotlib.rc_context(_LOOK):
        figure = make(figsize=(12.5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color="#888888", alpha=0.35, linewidth=0.7)
        for number, (run, points) in enumerate(zip(runs, curves)):
            look = {"color": _LINES[number % len(_LINES)], "linestyle": _DASHES[number // len(_LINES) % len(_DASHES)]}
            if points:
                axes.plot(*zip(*_thinned(points)), label=run.name, linewidth=1.6, **look)
            beside = _finite(run.column(chart.beside), chart.scale) if chart.beside else []
            if points and beside:
                axes.plot(*zip(*_thinned(beside)), label=f"{run.name}, {chart.beside_label}", linewidth=0.8, alpha=0.8, color=look["color"])
            if chart.key == "loss":
                held_out = _finite(run.held_out(), chart.scale)
                if held_out:
                    axes.plot(*zip(*held_out), label=f"{run.name}, held-out", marker="o", markersize=4, linewidth=0.8, color=look["color"])
        axes.set_xlabel("step")
        axes.set_ylabel(chart.unit)
        figure.legend(loc="outside right upper", fontsize=9)
        picture = _svg(matplotlib, figure)
    text = f"<p>{html.escape(chart.text)}</p>" if chart.text else ""
    return f"<h2>{html.escape(chart.title)}</h2>{text}{picture}"


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _tail(run: Run, key: str) -> float | None:
    values = [value for _, value in run.column(key)[-_TAIL:]]
    return statistics.fmean(values) if values else None


def _median(run: Run, key: str) -> float | None:
    values = [value for _, value in run.column(key)]
    return statistics.median(values) if values else None


def _most(run: Run, key: str) -> float | None:
    values = [value for _, value in run.column(key)]
    return max(values) if values else None


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _summary_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    def said(key: str) -> Callable[[Run], str]:
        return lambda run: str(run.header.get(key, ""))

    def last_evaluation(run: Run) -> str:
        losses = run.held_out()
        return _number(losses[-1][1]) if losses and losses[-1][0] == list(run.evaluations)[-1] else ""

    def skipped(run: Run) -> str:
        return str(sum(bool(line.get("overflow")) or bool(line.get("spike")) for line in run.steps.values()))

    columns: list[tuple[str, Callable[[Run], str]]] = [
        ("started", said("started")), ("strategy", said("strategy")), ("model", said("model")), ("parameters", said("parameters")),
        ("ranks", said("ranks")), ("seed", said("seed")), ("Tessera", said("tessera")),
        ("steps", lambda run: f"{len(run.steps):,} of {run.header.get('steps', '?')}"),
        ("starts of the job", lambda run: str(run.starts)),
        (f"loss, mean of the last {_TAIL}", lambda run: _number(_tail(run, "loss"))),
        ("loss on held-out data, last", last_evaluation),
        ("steps with an overflow or a spike", skipped),
        ("seconds a step, median", lambda run: _number(_median(run, "seconds"))),
        ("seconds a step, longest", lambda run: _number(_most(run, "seconds"))),
        ("tokens a second, median", lambda run: _number(_median(run, "tokens_per_second"))),
        ("share of communication, median, %", lambda run: _number(_scaled(_median(run, "communication_share"), 100), 3)),
        ("scaling efficiency, median, %", lambda run: _number(_scaled(_median(run, "scaling_efficiency"), 100), 3)),
        ("efficiency beside one rank's profile, median, %", lambda run: _number(_scaled(_median(run, "measured_efficiency"), 100), 3)),
        ("waited for data, median, s", lambda run: _number(_median(run, "data_seconds"), 3)),
        ("waited for the slowest rank, median, s", lambda run: _number(_median(run, "waited_for_seconds"), 3)),
        ("TFLOP/s a rank, median", lambda run: _number(_median(run, "tflops"), 3)),
        ("MFU, median, %", lambda run: _number(_scaled(_median(run, "mfu"), 100), 3)),
        ("memory of rank 0 at most, MiB", lambda run: _number(_scaled(_most(run, "bytes_allocated"), 1 / 2**20))),
        ("its plan, MiB", lambda run: _number(_scaled(_most(run, "bytes_planned"), 1 / 2**20))),
    ]
    rows = [(title, [of(run) for run in runs]) for title, of in columns]
    return [(title, cells) for title, cells in rows if any(cells)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Returns a table. `words`: the number of columns on the left that are text; all other columns are numbers."""
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag}{"" if i < words else " class=number"}>{html.escape(cell)}</{tag}>' for i, cell in enumerate(cells)) + "</tr>"

    return f'<div class="wide"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def _stragglers(run: Run) -> str:
    """Returns the run's table of stragglers. It has a row for each rank that was the slowest in a step; the rank for
    which the others waited longest in total comes first. Returns "" if no such rank is known."""
    waits: dict[int, list[float]] = {}
    for (_, rank), (_, seconds) in zip(run.column("waited_for_rank"), run.column("waited_for_seconds")):
        if math.isfinite(rank) and math.isfinite(seconds):
            waits.setdefault(int(rank), []).append(seconds)
    if not waits:
        return ""
    steps = sum(map(len, waits.values()))
    rows = [[str(rank), f"{len(each):,}", f"{100 * len(each) / steps:.1f}", f"{sum(each):.3f}", f"{1000 * max(each):.3f}"]
            for rank, each in sorted(waits.items(), key=lambda item: -sum(item[1]))]
    return (f"<h2>Stragglers: {html.escape(run.name)}</h2><p>The rank that was busy longest in a step, and for how long the others waited for it, "
            "on average.</p>" + _table(["rank", "steps", "steps, %", "waited in all, s", "longest, ms"], rows, 1))


def latency_bars(make: Any, latencies: Sequence[Latency]) -> Any:
    """Returns a figure with a line of bars for each of the slowest calls: from p50 to p95, to p99, and to the
    maximum."""
    slowest = sorted(latencies, key=lambda each: -each.p95_seconds)[:_MOST_BARS]
    figure = make(figsize=(12.5, 1 + 0.3 * len(slowest)), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="ms")
    ends = [[max(1000 * seconds, _LEAST_MS) for seconds in each[3:]] for each in slowest]
    for height, begin, label in ((0.7, 0, "p50 to p95"), (0.4, 1, "p95 to p99"), (0.15, 2, "p99 to the longest")):
        axes.barh(range(len(ends)), [each[begin + 1] - each[begin] for each in ends], height, [each[begin] for each in ends],
                  color=_LINES[begin], label=label)
    axes.set_yticks(range(len(slowest)), [f"{each.call} {each.unit}" for each in slowest], fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#888888", alpha=0.35, linewidth=0.7)
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def _latencies(run: Run) -> str:
    if not run.latencies:
        return ""
    matplotlib, make = _figures()
    with matplotlib.rc_context(_LOOK):
        picture = _svg(matplotlib, latency_bars(make, run.latencies))
    rows = [[each.call, each.unit, f"{each.count:,}", *(f"{1000 * seconds:.3f}" for seconds in each[3:])] for each in run.latencies]
    return (f"<h2>Latencies: {html.escape(run.name)}</h2><p>Milliseconds from the start of a call to the moment at which the rank found it ended, "
            f"over all calls since the process began.</p>{picture}" + _table(["call", "unit", "calls", "p50", "p95", "p99", "longest"], rows, 2))


def _notes(runs: Sequence[Run]) -> str:
    notes = [f"{run.name}: the last line is not whole and is left out, as where a process was killed." for run in runs if run.is_cut]
    notes += [f"{run.name}: the job was started {run.starts} times. Steps that were made again are drawn once, as they were made last."
              for run in runs if run.starts > 1]
    if any(len(run.steps) > _MOST_POINTS for run in runs):
        notes.append(f"A curve of more than {_MOST_POINTS} steps is drawn through means of neighbouring steps.")
    return "".join(f"<p>{html.escape(note)}</p>" for note in notes)


def page(runs: Sequence[Run]) -> str:
    """Returns the whole page as HTML. Raises Error (69) if matplotlib is not installed."""
    names = ", ".join(run.name for run in runs)
    body = f"<h1>{html.escape(names)}</h1>{_notes(runs)}" + _table(["", *(run.name for run in runs)], [[title, *cells] for title, cells in _summary_rows(runs)], 1)
    body += "".join(_chart(chart, runs) for chart in _CHARTS) + "".join(map(_stragglers, runs)) + "".join(map(_latencies, runs))
    return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(names)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n")
