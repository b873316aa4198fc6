"""Charts as inline SVG. Standard library only; no scripts, no fonts, nothing from elsewhere.

Families differ by brightness and hatching, lines by dashes and marks, so a page printed in black and white says as much
as one in colour. Colours are CSS variables and classes of the page's style (report.py), which has a dark set too.
"""

import html
import math

WIDTH = 900
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 2", "12 4")
_LINE_COLOURS = tuple(f"var(--line-{number})" for number in range(6))
DEFINITIONS = ('<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
               '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
               '<rect width="5" height="5" class="hatch-ground"/>'
               '<rect width="2" height="5" class="hatch-line"/></pattern>'
               "</defs></svg>")


def text(x, y, words, anchor="start", kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{html.escape(str(words))}</text>'


def _line(x1, y1, x2, y2, kind="axis", extra=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}" {extra}/>'


def _picture(height, parts, title):
    return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title)}">'
            f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>")


def legend(families):
    """One line that says which family has which fill; `families`: {family: label}."""
    parts, x = [], 0
    for family, label in families.items():
        parts.append(f'<rect x="{x}" y="3" width="14" height="12" class="bar {family}"/>')
        parts.append(text(x + 20, 13, label))
        x += 40 + 7 * len(label)
    return _picture(20, parts, "legend")


def nice_ticks(top, count=5):
    """About `count` round numbers from 0 up to at most `top`. REQUIRES: top > 0."""
    rough = top / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(top / step + 1e-9) + 1)]


def bars(title, rows, unit, references=()):
    """Horizontal bars from 0.

    rows: dicts of "label", "family", "value" (in `unit`), "note" (written behind the bar), and if known "low" and
    "high" (whiskers) and "mark" (a line across the bar, such as a formula's value). references: (label, value), each a
    dashed line through all bars.
    """
    left = max([230] + [8 + 7.6 * len(row["label"]) for row in rows])  # the longest label fits
    right, top, pitch, thickness = 190, 26 + 14 * max(0, len(references) - 1), 26, 16
    numbers = [row.get("high", row["value"]) for row in rows] + [row.get("mark", 0) for row in rows]
    most = max(numbers + [value for _, value in references]) * 1.02
    scale = (WIDTH - left - right) / most
    bottom = top + pitch * len(rows)
    parts = []
    for tick in nice_ticks(most):
        x = left + tick * scale
        parts += [_line(x, top, x, bottom, "grid"), text(x, bottom + 15, f"{tick:g}", "middle", "small")]
    parts.append(text(left, bottom + 31, unit, "start", "small"))
    for number, row in enumerate(rows):
        y = top + number * pitch + (pitch - thickness) / 2
        middle = y + thickness / 2
        parts.append(text(left - 8, middle + 4, row["label"], "end"))
        parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="{row["value"] * scale:.1f}" height="{thickness}" '
                     f'class="bar {row["family"]}"/>')
        if "low" in row:
            a, b = left + row["low"] * scale, left + row["high"] * scale
            # A halo in the page's colour below the line: seen on bars of any brightness, and beside them.
            for kind in ("whisker-halo", "whisker"):
                parts += [_line(a, middle, b, middle, kind), _line(a, middle - 4, a, middle + 4, kind),
                          _line(b, middle - 4, b, middle + 4, kind)]
        if "mark" in row:
            x = left + row["mark"] * scale
            parts += [_line(x, y - 4, x, y + thickness + 4, "mark-halo"), _line(x, y - 4, x, y + thickness + 4, "mark")]
        parts.append(text(WIDTH - right + 8, middle + 4, row["note"], "start", "small"))
    for number, (label, value) in enumerate(references):
        x = left + value * scale
        parts += [_line(x, top - 4, x, bottom, "reference"), text(x, top - 8 - 14 * number, label, "middle", "small")]
    parts.append(_line(left, top, left, bottom))
    return _picture(bottom + 38, parts, title)


def size_label(size):
    """4 B, 64 KiB, 1 MiB: bytes in powers of 1024, with at most one decimal."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size:g} B"


def time_label(seconds):
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor * 0.9995:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _decades(low, high):
    return [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def log_ticks(low, high):
    """Round numbers that enclose [low, high]: powers of 10, or 1, 2, 5 and their tens where the range is narrow."""
    if high / low >= 30:
        return _decades(low, high)
    steps = [factor * decade for decade in _decades(low, high) for factor in (1, 2, 5)]
    first = max(number for number, step in enumerate(steps) if step <= low * 1.0001)
    last = min(number for number, step in enumerate(steps) if step >= high * 0.9999)
    return steps[first:max(last, first + 1) + 1]


def lines(title, series, y_label, y_format=lambda y: f"{y:g}", x_label="bytes"):
    """Curves on logarithmic axes. series: dicts of "label" and "points" [(bytes, y)], both above 0. A series without
    points is left out, and keeps its line for other charts. REQUIRES: one point at least."""
    left, right, top, height = 70, 250, 14, 300
    points = [point for entry in series for point in entry["points"]]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    ticks = log_ticks(min(y for _, y in points), max(y for _, y in points))
    span = math.log(x_high / x_low) or 1.0
    x_of = lambda x: left + math.log(x / x_low) / span * (WIDTH - left - right)  # noqa: E731
    y_span = math.log(ticks[-1] / ticks[0])
    y_of = lambda y: top + height - math.log(y / ticks[0]) / y_span * height  # noqa: E731
    parts = []
    for tick in ticks:
        parts += [_line(left, y_of(tick), WIDTH - right, y_of(tick), "grid"),
                  text(left - 6, y_of(tick) + 4, y_format(tick), "end", "small")]
    power = math.ceil(math.log2(x_low) / 2) * 2
    step = max(2, 2 * round(span / math.log(2) / 16))
    while 2**power <= x_high * 1.0001:
        x = x_of(2**power)
        parts += [_line(x, top, x, top + height, "grid"),
                  text(x, top + height + 15, size_label(2**power), "middle", "small")]
        power += step
    drawn = [(number, entry) for number, entry in enumerate(series) if entry["points"]]
    for place, (number, entry) in enumerate(drawn):
        colour, dash = _LINE_COLOURS[number % len(_LINE_COLOURS)], _DASHES[number % len(_DASHES)]
        style = f'style="stroke:{colour};stroke-dasharray:{dash or "none"}"'
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in entry["points"])
        parts.append(f'<polyline points="{path}" class="curve" {style}/>')
        parts += [_marker(number, x_of(x), y_of(y), colour) for x, y in entry["points"]]
        y = top + 12 + 18 * place
        x = WIDTH - right + 14
        parts += [_line(x, y - 4, x + 34, y - 4, "curve", style), _marker(number, x + 17, y - 4, colour),
                  text(x + 42, y, entry["label"], "start", "small")]
    parts += [_line(left, top, left, top + height), _line(left, top + height, WIDTH - right, top + height),
              text(left, top + height + 31, f"{x_label}; up: {y_label}", "start", "small")]
    return _picture(top + height + 38, parts, title)


def _marker(number, x, y, colour):
    shape = number % 3
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" style="fill:{colour}"/>'
    if shape == 1:
        return (f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" '
                f'style="fill:var(--page);stroke:{colour};stroke-width:1.5"/>')
    return f'<path d="M{x:.1f} {y - 4:.1f} l4 7 h-8 z" style="fill:{colour}"/>'


def histograms(title, rows):
    """One histogram under the other over the same logarithmic time axis.

    rows: dicts of "label", "note" and "bins" [(low s, high s, count)]. Heights are shares of the row's largest bin.
    """
    left, right, pitch = 230, 190, 46
    low = min(row["bins"][0][0] for row in rows)
    high = max(row["bins"][-1][1] for row in rows)
    x_of = lambda s: left + math.log(s / low) / math.log(high / low) * (WIDTH - left - right)  # noqa: E731
    bottom = 8 + pitch * len(rows)
    parts = []
    for tick in _decades(low, high):
        if low <= tick * 1.0001 and tick <= high * 1.0001:
            parts += [_line(x_of(tick), 8, x_of(tick), bottom, "grid"),
                      text(x_of(tick), bottom + 15, time_label(tick), "middle", "small")]
    for number, row in enumerate(rows):
        base = 8 + pitch * (number + 1) - 6
        most = max(count for _, _, count in row["bins"])
        for a, b, count in row["bins"]:
            height = (pitch - 12) * count / most
            if count:
                parts.append(f'<rect x="{x_of(a):.1f}" y="{base - height:.1f}" width="{x_of(b) - x_of(a):.1f}" '
                             f'height="{height:.1f}" class="bin"/>')
        parts += [_line(left, base, WIDTH - right, base), text(left - 8, base - 8, row["label"], "end"),
                  text(WIDTH - right + 8, base - 8, row["note"], "start", "small")]
    return _picture(bottom + 22, parts, title)


def timeline(title, events):
    """Spans over time, one lane a track. events: dicts of "track", "name", "start_us", "duration_us"; times from 0."""
    left, right, pitch = 180, 20, 28
    tracks = sorted({event["track"] for event in events})
    total = max(event["start_us"] + event["duration_us"] for event in events)
    scale = (WIDTH - left - right) / total
    bottom = 8 + pitch * len(tracks)
    names = sorted({event["name"] for event in events})
    parts = []
    for tick in nice_ticks(total / 1000):
        x = left + tick * 1000 * scale
        parts += [_line(x, 8, x, bottom, "grid"), text(x, bottom + 15, f"{tick:g}", "middle", "small")]
    for track in tracks:
        y = 8 + pitch * tracks.index(track)
        parts.append(text(left - 8, y + 17, track, "end"))
        for event in events:
            if event["track"] != track:
                continue
            width = max(event["duration_us"] * scale, 0.5)
            shade = 25 + 60 * names.index(event["name"]) // max(len(names), 1)
            label = f"{event['name']}: {time_label(event['duration_us'] * 1e-6)}"
            x = left + event["start_us"] * scale
            parts.append(f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{pitch - 8}" '
                         f'fill="hsl(214 40% {shade}%)" class="span">'
                         f'<title>{html.escape(label)}</title></rect>')
            if width > 7 * len(event["name"]):
                kind = "small on-dark" if shade < 55 else "small on-light"
                parts.append(text(x + 4, y + 18, event["name"], kind=kind))
    parts.append(text(left, bottom + 31, "ms from the start of the step", "start", "small"))
    return _picture(bottom + 38, parts, title)
