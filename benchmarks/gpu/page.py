"""A GPU run's results as Markdown. Standard library only."""

from gpu import tables

_FORMULA = ("A step's model FLOP/s: tokens a second times 6 FLOP for each parameter of a matrix product and "
            "12 * layers * width * sequence length for attention (PaLM, arXiv 2204.02311, appendix B); "
            "what is computed again in backward does not count.")
_MEMORY = ("GPU memory is what the process added to the GPU at its peak, CUDA and allocator included. Tensors: "
           "PyTorch's own count in the timed steps, with activations; for Tessera the Engine's memory, without them.")


def cell(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value.replace("|", "\\|").replace("\n", " ")


def _lines(rows):
    return [f"| {' | '.join(row)} |" for row in rows]


def markdown(table):
    """A heading and the table; the column of notes only where there is one."""
    columns, rows = table["columns"], table["rows"]
    if columns[-1] == "note" and not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    rule = ["---" if all(row[k] is None or isinstance(row[k], str) for row in rows) else "---:"
            for k in range(len(columns))]
    lines = _lines([columns, rule, *([cell(value) for value in row] for row in rows)])
    return "\n".join([f"## {table['title']}", "", *lines, ""])


def _run(run):
    changed = {True: " with uncommitted changes", False: "", None: ""}[run["commit"]["dirty"]]
    return (f"{', '.join(run['sections'])}: commit {run['commit']['hash']}{changed}, {run['started']}, "
            f"{run['seconds']:.0f} s of {run['budget_s']:.0f}: `{run['command']}`")


def _facts(data):
    gpu, machine = data["gpu"], data["machine"]
    facts = {"processor": f"{machine['cpu']}, {machine['cores']} cores",
             "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
             "rounds": f"{data['rounds']} at the most"}
    facts |= {f"run {number}": _run(run) for number, run in enumerate(data["runs"], start=1)}
    if gpu:
        facts = {"GPU": f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, driver {gpu['driver']}, "
                        f"power limit {gpu['power_limit_w']} W"} | facts
    return "\n".join([*_lines([["", ""], ["---", "---"], *([name, cell(text)] for name, text in facts.items())]), ""])


def _noted(title, entries, turn):
    """`turn`: what is said of an entry's round."""
    if not entries:
        return ""
    parts = [f"## {title}", ""]
    for entry in entries:
        first, *rest = entry["why"].strip().splitlines()
        parts += [f"- {entry['what']}{turn.format(entry['round']) if entry['round'] else ''}: {first}"]
        parts += ["", "  ```", *(f"  {line}" for line in rest), "  ```", ""] if rest else []
    return "\n".join([*parts, ""])


def _checks(data):
    lines = [f"- {check['work']}: {check['result']}" for check in data["checks"]]
    return "\n".join(["Verified in this run:", "", *lines, ""]) if lines else ""


def text(data):
    results = tables.Results(data)
    meaningless = "**A smoke test: its figures mean nothing.**\n" if data["quick"] or not data["gpu"] else ""
    tests = tables.gpu_tests(results)
    parts = [f"# Tessera on {data['gpu']['name'] if data['gpu'] else 'the CPU'}\n", meaningless, _facts(data),
             _checks(data), markdown(tables.ratios(results)), markdown(tables.limits(results)),
             markdown(tables.optimizer(results)),
             markdown(tables.launches(results)) if data["launches"] else "",
             *(markdown(tables.steps(results, work)) for work in data["works"]), f"{_FORMULA}\n", f"{_MEMORY}\n",
             markdown(tests) if tests["rows"] else "No test was run.\n",
             _noted("Failed", data["failed"], ", round {}"),
             _noted("Not run", data["not_run"], ", from round {} on")]
    return "\n".join(part for part in parts if part)
