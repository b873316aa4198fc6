"""Makes the parts that the pages of host, network and GPU runs share, in HTML or Markdown: tables, facts about runs,
and failures. It uses the standard library only."""

import html
import pathlib
import re
import string

from readable import heading, shown, size_label

SMOKE_TEST = "A smoke test: its figures mean nothing."
_TEMPLATE = string.Template(pathlib.Path(__file__).with_name("page.html").read_text())


def html_table(headings, rows, kind=""):
    """Returns a table. Headings and cells are text, or (text, class of the cell)."""
    def cell(tag, value):
        text, of = value if isinstance(value, tuple) else (value, "")
        return f'<{tag} class="{of}">{html.escape(text)}</{tag}>' if of else f"<{tag}>{html.escape(text)}</{tag}>"
    head = "".join(cell("th", value) for value in headings)
    body = "".join(f"<tr>{''.join(cell('td', value) for value in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def number(text):
    """Makes a table cell for a number."""
    return text, "number"


def of_table(table, names, without=()):
    """Returns a table of tables.py. Columns that `without` names are left out."""
    kept = [place for place, column in enumerate(table["columns"]) if column not in without]
    numeric = {place for place in kept if not any(isinstance(row[place], str) for row in table["rows"])}

    def cell(place, text):
        return number(text) if place in numeric else text

    return html_table([cell(place, heading(table["columns"][place])) for place in kept],
                      [[cell(place, names(shown(table["columns"][place], row[place]))) for place in kept] for row in table["rows"]])


def without_empty(table):
    """Returns the table without its empty columns."""
    kept = [place for place in range(len(table["columns"])) if any(row[place] is not None for row in table["rows"])]
    return table | {"columns": [table["columns"][place] for place in kept],
                    "rows": [[row[place] for place in kept] for row in table["rows"]]}


def anchor(title):
    """Returns an id such as step-time-gpt-of-69-m-parameters-fp32."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def document(data, title, heading, summary, sections):
    """Returns a page of sections (title, content), with a list of links to them. Sections without content are left out."""
    sections = [section for section in sections if section and section[1]]
    items = "".join(f'<li><a href="#{anchor(title)}">{html.escape(title)}</a></li>' for title, _ in sections)
    quick = f"<p><strong>{SMOKE_TEST}</strong></p>" if data["quick"] else ""
    body = "".join(f'<h2 id="{anchor(title)}">{html.escape(title)}</h2>{content}' for title, content in sections)
    return _TEMPLATE.substitute(title=html.escape(title), body=f"<h1>{html.escape(heading)}</h1>{quick}{summary}<nav><h3>Contents</h3>"
                                                               f"<ul>{items}</ul></nav>{body}")


def facts(data, more):
    """Returns [(name, text)], the facts about a run. `more` has the facts that only runs of this kind (host, network or
    GPU) have."""
    found = [*more, ("versions", ", ".join(f"{name} {version}" for name, version in data["versions"].items()))]
    found += [(f"run {place}", _run(run)) for place, run in enumerate(data["runs"], start=1)]
    if "thinned_to" in data:
        found.append(("samples", f"the longest lists of samples were thinned evenly, to {data['thinned_to']} each"))
    return found


def _run(run):
    changed = " with uncommitted changes" if run["commit"]["dirty"] else ""
    budget = f" of {run['budget_s']:.0f}" if run.get("budget_s") else ""
    took = f", {run['seconds']:.0f} s{budget}" if run["seconds"] else ""
    return (f"{', '.join(run['sections'])}: commit {run['commit']['hash']}{changed}, {run['started']}{took}, "
            f"rounds: {run['rounds']}{machine_text(run)}: `{run['command']}`")


def machine_text(run):
    """Describes the machine of a run. Returns "" if the run does not say where it was."""
    machine = run["machine"]
    return machine and (f"; {run.get('processor') or '{cpu}, {cores} cores'.format(**machine)}, {size_label(machine['memory_bytes'])}, "
                        f"kernel {machine['kernel']}, load average at the start {machine['load_average_at_start']:.2f}") or ""


def this_run(data, more=(), behind=""):
    """Makes the section with the facts about this run."""
    table = html_table(("", ""), facts(data, more), "facts")
    return "This run", re.sub("`([^`]*)`", r"<code>\1</code>", table) + behind


def checked(data, names):
    """Returns lines that list all verified facts."""
    return [f"{names(check['work'])}: {check['result']}" for check in data["checks"]]


def html_list(lines):
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def noted(data):
    """Yields (the task, with the round in which it failed or was not run; the first line of the reason; its other
    lines)."""
    for section, turn in (("failed", ", round {}"), ("not_run", ", from round {} on")):
        for entry in data[section]:
            first, *rest = entry["why"].strip().splitlines()
            yield entry["what"] + (turn.format(entry["round"]) if entry["round"] else ""), first, rest


def missing(data):
    """Makes the section about everything that failed or was not run."""
    items = "".join(
        f"<li>{html.escape(what)}: {html.escape(first)}"
        + (f"<details><summary>what it said</summary><pre>{html.escape(chr(10).join(rest))}</pre></details>" if rest else "") + "</li>"
        for what, first, rest in noted(data))
    return "Not in this run, or failed", items and f"<ul>{items}</ul>"


def markdown_cell(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value.replace("|", "\\|").replace("\n", " ")


def markdown_lines(rows):
    return [f"| {' | '.join(map(markdown_cell, row))} |" for row in rows]


def markdown_table(table):
    """Returns a heading and the table. It has a column of notes only if some row has a note."""
    columns, rows = table["columns"], table["rows"]
    if columns[-1] == "note" and not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    rule = ["---" if all(row[place] is None or isinstance(row[place], str) for row in rows) else "---:"
            for place in range(len(columns))]
    return "\n".join([f"## {table['title']}", "", *markdown_lines([columns, rule, *rows]), ""])
