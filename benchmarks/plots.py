"""Charts made by matplotlib, as SVG. A chart is inline in a page, whose style gives the colours, or a separate file.

Families differ by brightness and hatching, and lines by dashes and marks. A page printed in black and white therefore
shows as much as one in colour. The colours of COLOURS become variables of the page's style (page.html), which has a
dark set too. Each function makes a matplotlib Figure, which svg() writes.
"""

import html
import io
import math
import re

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from readable import size_label, time_label

WIDTH = 900  # width of all pictures, in units of the SVG
# Each colour differs from all others, so that the program finds it in the output of matplotlib.
COLOURS = {"page": "#ffffff", "ink": "#111111", "soft": "#444444", "edge": "#333333", "grid": "#dddddd", "mark": "#c0392b",
           "tessera": "#1f3a5f", "python": "#7989a0", "torch": "#d9d9d9", "hatch": "#777777",
           "line-1": "#a03a2c", "line-2": "#5d7f3a", "line-3": "#787878", "line-4": "#8a6d1f", "line-5": "#6b4a8a", "line-6": "#0a8f8f",
           "line-7": "#b05a00", "line-8": "#2f6fb0"}
_LINES = ["tessera", *(name for name in COLOURS if name.startswith("line-"))]
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)), (0, (1, 1.2)), (0, (8, 3)))
_MARKERS = ({"marker": "o"}, {"marker": "s", "markerfacecolor": COLOURS["page"]}, {"marker": "^"})
_FILLS = {"tessera": {"facecolor": COLOURS["tessera"]}, "python": {"facecolor": COLOURS["python"]},
          "torch": {"facecolor": COLOURS["torch"]},
          "deepspeed": {"facecolor": COLOURS["page"], "hatch": "////", "hatchcolor": COLOURS["hatch"]}}
_HALO = [withStroke(linewidth=4, foreground=COLOURS["page"])]
_STYLE = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 12, "axes.edgecolor": COLOURS["edge"],
          "text.color": COLOURS["ink"], "axes.labelcolor": COLOURS["soft"], "xtick.labelcolor": COLOURS["soft"],
          "ytick.labelcolor": COLOURS["ink"], "xtick.color": COLOURS["edge"], "ytick.color": COLOURS["edge"],
          "grid.color": COLOURS["grid"], "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
          "legend.frameon": False, "hatch.linewidth": 1.5, "patch.edgecolor": COLOURS["edge"]}


_styled = matplotlib.rc_context(_STYLE)


def _figure(height):
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")  # 72 units of an SVG are an inch
    axes = figure.add_subplot()
    axes.tick_params(left=False, bottom=False)
    axes.grid(axis="x")
    return figure, axes


def _lanes(axes, labels, notes=None):
    """Draws rows from the top down, each with a label on its left and a note on its right."""
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    if notes:
        behind = axes.twinx()
        behind.set_ylim(axes.get_ylim())
        behind.set_yticks(range(len(labels)), notes)
        behind.tick_params(right=False, labelsize=11, labelcolor=COLOURS["soft"])
        behind.spines[:].set_visible(False)
        axes.tick_params(left=False)  # twinx() has turned the ticks on again


@_styled
def bars(rows, unit, families, references=()):
    """Draws horizontal bars from 0.

    rows: dicts of "label", "family", "value" (in `unit`), "note" (written behind the bar), and if known "low" and
    "high" (whiskers) and "mark" (a line across the bar, such as a formula's value). families: {family: label}, for the
    legend. references: (label, value), each a dashed line through all bars.
    """
    figure, axes = _figure(60 + 26 * len(rows) + 14 * len(references))
    _lanes(axes, [row["label"] for row in rows], [row["note"] for row in rows])
    for place, row in enumerate(rows):
        axes.barh(place, row["value"], height=0.62, edgecolor=COLOURS["edge"], **_FILLS[row["family"]])
        # A halo in the page's colour makes the line visible both on bars of any brightness and beside them.
        if "low" in row:
            axes.errorbar(row["value"], place, xerr=[[row["value"] - row["low"]], [row["high"] - row["value"]]], fmt="none",
                          color=COLOURS["ink"], elinewidth=1.4, capsize=3, path_effects=_HALO)
        if "mark" in row:
            axes.plot([row["mark"]] * 2, [place - 0.45, place + 0.45], color=COLOURS["mark"], linewidth=2.5, path_effects=_HALO)
    for number, (label, value) in enumerate(references):
        axes.axvline(value, color=COLOURS["ink"], linewidth=1.5, linestyle=(0, (4, 3)))
        axes.annotate(label, (value, 1), (0, 4 + 14 * number), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="center", fontsize=11, color=COLOURS["soft"])
    axes.set_xlim(left=0)
    axes.set_xlabel(unit, loc="left")
    figure.legend(handles=[Patch(label=label, edgecolor=COLOURS["edge"], **_FILLS[family]) for family, label in families.items()],
                  loc="outside upper left", ncols=len(families))
    return figure


def _curves(axes, series, marked=True):
    """Draws curves. A series without points is left out, but keeps its line style, so that a series looks the same in
    all charts."""
    for number, entry in enumerate(series):
        if entry["points"]:
            marker = _MARKERS[number % len(_MARKERS)] if marked else {}
            axes.plot(*zip(*entry["points"]), label=entry["label"], color=COLOURS[_LINES[number % len(_LINES)]], markersize=5.5,
                      linestyle=_DASHES[number % len(_DASHES)], **marker)
    axes.grid(axis="y")


@_styled
def lines(series, y_label, y_format=lambda y: f"{y:g}", x_label="bytes"):
    """Draws curves on logarithmic axes. series: dicts of "label" and "points" [(bytes, y)], both above 0. REQUIRES: at
    least one point."""
    figure, axes = _figure(340)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _curves(axes, series)
    figure.legend(loc="outside right upper", handlelength=3.5, labelcolor=COLOURS["soft"], fontsize=11)
    values = [y for entry in series for _, y in entry["points"]]
    # The values lie between two ticks. Ticks are powers of 10 or, if the range is narrow, also 2 and 5 times these.
    factors = (1, 2, 5) if max(values) < 30 * min(values) else (1,)
    decades = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    axes.set_ylim(max(tick for tick in ticks if tick < min(values)), min(tick for tick in ticks if tick > max(values)))
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    for axis, label in ((axes.xaxis, size_label), (axes.yaxis, y_format)):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(lambda value, _, label=label: label(value))
    axes.set_xlabel(x_label, loc="left")
    axes.set_ylabel(y_label)
    return figure


@_styled
def curves(series, x_label, y_label, y_limits):
    """Draws curves on linear axes."""
    figure, axes = _figure(420)
    _curves(axes, series, marked=False)
    axes.legend(loc="upper right", handlelength=3.5, labelcolor=COLOURS["soft"], fontsize=11)
    axes.set_ylim(*y_limits)
    axes.set_xlabel(x_label, loc="left")
    axes.set_ylabel(y_label)
    return figure


@_styled
def histograms(rows):
    """Draws histograms, one under the other, over the same logarithmic time axis.

    rows: dicts of "label", "note" and "bins" [(low s, high s, count)]. Heights are shares of the row's largest bin.
    """
    figure, axes = _figure(40 + 46 * len(rows))
    _lanes(axes, [row["label"] for row in rows], [row["note"] for row in rows])
    axes.set_xscale("log")
    for place, row in enumerate(rows):
        most = max(count for _, _, count in row["bins"])
        low, high, heights = zip(*((low, high, -0.8 * count / most) for low, high, count in row["bins"]))
        axes.stairs([place + 0.4 + height for height in heights], [*low, high[-1]], baseline=place + 0.4, fill=True,
                    color=COLOURS["tessera"])
    axes.xaxis.set_major_formatter(lambda seconds, _: time_label(seconds))
    axes.xaxis.set_minor_locator(NullLocator())
    return figure


@_styled
def timeline(events):
    """Draws spans over time, with one lane for each track. events: dicts of "track", "name", "start_us" (from 0) and
    "duration_us". Events whose names begin with the same word ("reduce blocks.0") have one shade."""
    tracks = sorted({event["track"] for event in events})
    kinds = sorted({event["name"].partition(" ")[0] for event in events})
    figure, axes = _figure(80 + 34 * len(tracks))
    _lanes(axes, tracks)
    shades = {kind: 0.2 + 0.8 * number / len(kinds) for number, kind in enumerate(kinds)}
    for event in events:
        axes.barh(tracks.index(event["track"]), event["duration_us"] / 1e3, left=event["start_us"] / 1e3, height=0.7,
                  facecolor=COLOURS["tessera"], alpha=shades[event["name"].partition(" ")[0]], linewidth=0)
    axes.set_xlabel("ms from the start of the step", loc="left")
    figure.legend(handles=[Patch(label=kind, facecolor=COLOURS["tessera"], alpha=shade, linewidth=0) for kind, shade in shades.items()],
                  loc="outside upper left", ncols=len(kinds))
    return figure


def svg(figure, title, inline=True):
    """Writes a picture. `title`: its title, which must be unique on the page. An inline picture gets the colours and
    the font from the page, and nothing is cut off at the axes."""
    file = io.StringIO()
    figure.patch.set_alpha(0 if inline else 1)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg"):]
    font = "" if inline else "font-family: Arial, 'Liberation Sans', sans-serif; "
    for pattern, by in (("<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", ""), (r' transform="rotate\(-0 [^"]*"', ""),
                        ('<clipPath.*?</clipPath>| clip-path="[^"]*"' if inline else "$^", ""), ("font-family: [^;]*; ", font),
                        (r'(?<=[\s"])(-?\d+\.\d\d)\d+(?=[\s"])', r"\1"), (r"\s*\n\s*", " ")):
        text = re.sub(pattern, by, text, flags=re.DOTALL)
    # Only elements to which other elements refer keep their ids. Ids of different pictures differ.
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found.group() if found.group(1) in used else "", text)
    if not inline:
        return text
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    opened = f'<svg viewBox="0 0 {WIDTH} {72 * figure.get_figheight():g}" role="img" aria-label="{html.escape(title)}">'
    return re.sub("<svg[^>]*>", lambda _: f"{opened}<title>{html.escape(title)}</title>", text.replace("xlink:href", "href"), count=1)
