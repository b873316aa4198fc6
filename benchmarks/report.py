#!/usr/bin/env python3
"""Writes the tables (CSV) and the page (index.html) of a results.json; nothing is measured here. Standard library only.

    report.py results.json --out DIR

results.json, made by benchmarks/run, is one object:

    schema, quick, command, started, commit {hash, dirty}, machine {...}, versions {...}, ranks, rounds
    works        [{name, title, model, dtype, parameters, timed_steps_a_round, warm_up_steps}]
    contenders   [{name, family, label, stage, alone, private_copies?}]
    checks       [{work, result}]                      what was verified before the timing
    steps        [{work, contender, rounds_s: [[s]], losses: [[a rank's]], allocated_bytes?, planned_bytes?}]
    memory       [{work, contender, baseline_bytes, peak_bytes, allocated_bytes?, planned_bytes?}]   means of ranks
    python       [{contender, label, family, alone, title, parameters, tokens_a_rank, rounds_s, baseline_bytes?,
                 peak_bytes?}]                         one Python model under everybody (may be absent)
    optimizer    [{contender, numel, rounds_s}]        one thread
    optimizer_avx2    [{contender, numel, rounds_s}]   with nothing wider than AVX2; Tessera's too, with limit_rounds_s
    collectives  [{contender: "gloo" | "limit", collective, bytes, rounds_s}]   a round: 500 samples at most
    crowded      [{contender, ranks, title, tokens_a_rank, rounds_s}]   as many ranks on the machine's cores
    disk         [{contender, kind: "write" | "read" | "mixed", bytes, settings, rounds_s, rounds_cpu_s}]   whole passes
    disk_steps   [{contender, numel, bytes, memory_bytes?, rounds_s, rounds_limit_s?}]   steps with their state on disk
                 (disk and disk_steps may be absent)
    tessera_bench {section: what `tessera bench SECTION` wrote (tessera_bench.py)}
    timeline     [{track, name, start_us, duration_us}] or null
    missing      [{what, why}]                         what the page leaves out
    later?       [{sections, commit, started, command, machine, rounds}]   sections that were measured again, or added
"""

import argparse
import csv
import html
import json
import pathlib
import re
import sys

import readable
import stats
import svg
import tables
import targets

SCHEMA = 1
_FAMILIES = {"tessera": "Tessera", "torch": "PyTorch", "deepspeed": "DeepSpeed"}
# (contender, memory) of a collective: the name of its curve.
_CURVES = {("tessera", "private"): "Tessera, private memory", ("tessera", "group"): "Tessera, the group's memory",
           ("tessera", "common"): "Tessera, common memory", ("gloo", "private"): "Gloo",
           ("limit", "private"): "memory limit"}
_IN_PYTHON = {"python": "Tessera in Python", "torch": "PyTorch", "deepspeed": "DeepSpeed"}
_HISTOGRAM_BYTES = (0, 4, 1 << 20, 1 << 24)
_LIGHT = """--page: #fff; --ink: #111; --soft: #444; --rule: #999; --grid: #ddd; --good: #1e6b34; --bad: #b03224;
  --tessera: #1f3a5f; --torch: #d9d9d9; --hatch: #777; --edge: #333; --mark: #c0392b;
  --line-0: #1f3a5f; --line-1: #a03a2c; --line-2: #5d7f3a; --line-3: #777; --line-4: #8a6d1f; --line-5: #6b4a8a;"""
_DARK = """--page: #16181c; --ink: #e6e6e6; --soft: #b4b8be; --rule: #666; --grid: #34373d; --good: #7fce95;
  --bad: #ff9488; --tessera: #6f9fdc; --torch: #54585f; --hatch: #9a9fa8; --edge: #a8adb5; --mark: #ff7a6b;
  --line-0: #7fb0f0; --line-1: #f0907f; --line-2: #a5cf7a; --line-3: #a9adb3; --line-4: #dfbf66; --line-5: #c3a0e6;"""
STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
""" + """
body { font: 15px/1.5 Georgia, "Liberation Serif", serif; color: var(--ink); background: var(--page);
       max-width: 980px; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.7em; margin-bottom: 0; }
h2 { font-size: 1.25em; margin: 2em 0 .3em; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1.05em; margin: 1.5em 0 .2em; } p { margin: .4em 0; max-width: 46em; } a { color: inherit; }
nav ul { columns: 2; padding-left: 1.2em; max-width: 60em; } nav li { break-inside: avoid; }
table { border-collapse: collapse; margin: .6em 0 1.2em; font: 12px/1.45 Arial, "Liberation Sans", sans-serif; }
th { text-align: left; border-bottom: 1.5px solid var(--edge); padding: 2px 10px 2px 0; vertical-align: bottom; }
td { border-bottom: 1px solid var(--grid); padding: 2px 10px 2px 0; } td.number, th.number { text-align: right; }
.summary { font-size: 13px; } .summary td:first-child { white-space: nowrap; }
.summary td.number, .summary th.number { padding-left: 14px; }
.yes { color: var(--good); } .no { color: var(--bad); font-weight: bold; }
.facts td:first-child { color: var(--soft); } code { font-size: .88em; } .scroll { overflow-x: auto; }
.note { border-left: 3px solid var(--tessera); padding-left: .8em; }
details > summary { cursor: pointer; color: var(--soft); margin: .4em 0; }
svg { display: block; width: 100%; height: auto; margin: .5em 0; font: 13px Arial, "Liberation Sans", sans-serif; }
svg text { fill: var(--ink); } svg .small { font-size: 11.5px; fill: var(--soft); }
svg .on-dark { fill: #fff; } svg .on-light { fill: #111; }
svg .axis { stroke: var(--edge); } svg .grid { stroke: var(--grid); } svg .curve { fill: none; stroke-width: 2; }
svg .bar { stroke: var(--edge); } svg .tessera { fill: var(--tessera); } svg .torch { fill: var(--torch); }
svg .python { fill: var(--tessera); fill-opacity: .6; }
svg .deepspeed { fill: url(#hatch); } svg .hatch-ground { fill: var(--page); } svg .hatch-line { fill: var(--hatch); }
svg .bin { fill: var(--tessera); stroke: var(--page); stroke-width: .5; }
svg .span { stroke: var(--page); stroke-width: .5; }
svg .reference { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg .whisker { stroke: var(--ink); stroke-width: 1.4; } svg .whisker-halo { stroke: var(--page); stroke-width: 4; }
svg .mark { stroke: var(--mark); stroke-width: 2.5; } svg .mark-halo { stroke: var(--page); stroke-width: 5; }
@media print { body { max-width: none; margin: 0; } h2, h3, svg { break-after: avoid; } }
"""
# What `tessera bench` tables are called, and what they show.
_BENCH = {"step": ("The strategies' steps", "Where a step's time goes under each strategy."),
          "memory": ("The strategies' memory", "What is planned, allocated and measured under each strategy."),
          "overhead": ("What the Engine costs an operator", "The time of one small operator under the operator watch.")}
_SHARING = ("With ranks of one host sharing one copy of the parameters nothing is gathered, while FSDP2 and DeepSpeed "
            "gather.")


def last_step_of_trace(trace):
    """Events of the last complete step in a Chrome trace (an object with traceEvents, or the list itself).

    A step is a complete event (ph "X") named "step"; the events of any process that begin within it belong to it.
    Tracks are "process / thread", by the names that the trace gives them. ValueError if there is no step.
    """
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    spans = [event for event in events if event.get("ph") == "X"]
    step = max((event for event in spans if event["name"] == "step"), key=lambda event: event["ts"], default=None)
    if step is None:
        raise ValueError('the trace has no complete event named "step"')
    names = {(event["name"], event.get("pid"), event.get("tid") if event["name"] == "thread_name" else None):
             event["args"]["name"] for event in events if event.get("ph") == "M" and "name" in event.get("args", {})}

    def track(event):
        pid, tid = event.get("pid"), event.get("tid")
        return f"{names.get(('process_name', pid, None), pid)} / {names.get(('thread_name', pid, tid), tid)}"

    begin, end = step["ts"], step["ts"] + step["dur"]
    return [{"track": track(event), "name": event["name"], "start_us": event["ts"] - begin, "duration_us": event["dur"]}
            for event in spans if begin <= event["ts"] < end and event["name"] != "step"]


def shown(column, value):
    """A cell of the page: a few digits, in the unit that the column's name ends in."""
    if value is None:
        return "one a tensor" if column == "bucket_bytes" else ""
    if isinstance(value, str):
        return value
    if column.endswith("_s") and not column.endswith("_per_s"):
        return ("-" + svg.time_label(-value)) if value < 0 else svg.time_label(value)
    if column.endswith("bytes"):
        return svg.size_label(value)
    if column == "bytes_per_s":
        return f"{value / 1e9:.3g} GB/s"
    if column.endswith(("_fraction", "_limit")):
        return f"{100 * value:.0f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(table, names, without=()):
    kept = [number for number, column in enumerate(table["columns"]) if column not in without]
    numeric = {n for n in kept if not any(isinstance(row[n], str) for row in table["rows"])}

    def cell(tag, number, words):
        kind = ' class="number"' if number in numeric else ""
        return f"<{tag}{kind}>{html.escape(words)}</{tag}>"

    head = "".join(cell("th", n, readable.heading(table["columns"][n])) for n in kept)
    body = "".join("<tr>" + "".join(cell("td", n, names(shown(table["columns"][n], row[n]))) for n in kept) + "</tr>"
                   for row in table["rows"])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _without_empty(table):
    """Without the columns in which no row has anything."""
    kept = [n for n in range(len(table["columns"])) if any(row[n] is not None for row in table["rows"])]
    return table | {"columns": [table["columns"][n] for n in kept],
                    "rows": [[row[n] for n in kept] for row in table["rows"]]}


def _list(words):
    """a; a and b; a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def anchor(title):
    """step-time-gpt-of-69-m-parameters-fp32"""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _of_work(table, work):
    return table | {"rows": [row for row in table["rows"] if row[0] == work]}


def _bar_unit(most):
    return (1.0, "seconds") if most >= 1 else (1e-3, "milliseconds")


def _family_of(contender):
    """Of a contender outside the steps of training; what is not DeepSpeed's is drawn as PyTorch's."""
    return next((family for family in ("tessera", "deepspeed") if contender.startswith(family)), "torch")


def _name_of_commit(commit):
    return commit["hash"] + (" with uncommitted changes" if commit["dirty"] else "")


class Page:
    """The sections of index.html, in order. Sections without data are left out; `missing` says why."""

    def __init__(self, data):
        self.data = data
        self.results = tables.Results(data)
        self.names = readable.Names(data)
        self.families = {family: label for family, label in _FAMILIES.items()
                         if any(contender["family"] == family for contender in data["contenders"])}

    def text(self):
        sections = [self._ratios(), *map(self._steps, self.data["works"]),
                    *map(self._memory, self.data["works"]), self._python(), self._optimizer(),
                    self._collectives(), self._latencies(), self._crowded(), self._disk(), self._buckets(), self._timeline(),
                    *map(self._bench_table, ("step", "memory", "overhead")), self._missing(), self._run()]
        sections = [section for section in sections if section]
        body = self._summary() + self._contents(sections) + "".join(
            f'<h2 id="{anchor(title)}">{html.escape(title)}</h2>{content}' for title, content in sections)
        return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
                '<meta name="viewport" content="width=device-width"><title>Tessera: benchmarks</title>'
                f"<style>{STYLE}</style></head><body>{svg.DEFINITIONS}{body}</body></html>\n")

    @staticmethod
    def _contents(sections):
        items = "".join(f'<li><a href="#{anchor(title)}">{html.escape(title)}</a></li>' for title, _ in sections)
        return f"<nav><h3>Contents</h3><ul>{items}</ul></nav>"

    def _summary(self):
        quick = "<p><strong>A smoke test: its figures mean nothing.</strong></p>" if self.data["quick"] else ""
        machine = self.data["machine"]
        setting = (f"<p>{self.data['ranks']} ranks of one thread on one host with {machine['cores']} cores, all "
                   "contenders in turn in one run. A ratio is the peer's median over Tessera's: above 1 Tessera is "
                   "faster, or smaller.</p>")
        rows = tables.ratios(self.results)["rows"]
        return (f"<h1>Tessera beside its peers</h1>{quick}{setting}" + self._beside_fsdp2(rows) + self._reached(rows)
                + self._summary_table(rows) + self._sharing())

    def _beside_fsdp2(self, rows):
        pair = [tables.label(self.results, name) for name in ("torch_fsdp2", "tessera_full_shard")]
        times, sizes = ([f"{row[6]:.1f}" for row in rows if row[0] == measure and row[3:5] == pair]
                        for measure in ("step", "peak_memory"))
        if not times:
            return ""
        memory = f"; the peak memory of a rank is smaller by the factors {_list(sizes)}" if sizes else ""
        return (f"<p>A step of {pair[1]} is faster than one of {pair[0]} by the factors {_list(times)}"
                f"{memory} (one factor a model that was trained).</p>")

    def _reached(self, rows):
        judged = [row for row in rows if row[-1]]
        if not judged:
            return ""
        missed = [f"{self._ratio_name(row)}: {row[6]:.3g} of {row[5]:.3g}" for row in judged if row[-1] == "no"]
        items = "".join(f"<li>{html.escape(item)}</li>" for item in missed)
        details = f"<details><summary>The targets that are missed</summary><ul>{items}</ul></details>" if missed else ""
        return f"<p>Of {len(judged)} targets {len(judged) - len(missed)} are reached.</p>{details}"

    def _ratio_name(self, row):
        measure, subject, size, peer, tessera = row[:5]
        of = readable.subject_label(self.names, subject, size) if subject else self.names(tessera)
        return f"{self.names(measure)}, {of}, beside {self.names(peer)}"

    def _summary_table(self, rows):
        """A row a comparison, a column a work; in a cell the ratio, and the target where it has one."""
        works = list(self.results.works)
        lines, last = [], None
        for title, measure, peer, ours in targets.SUMMARY:
            key = [measure, *(tables.label(self.results, name) for name in (peer, ours))]
            found = {row[1]: row for row in rows if [row[0], *row[3:5]] == key}
            if not found:
                continue
            if measure != last:
                lines.append(f'<tr><th colspan="{len(works) + 1}">{self.names(measure)}</th></tr>')
                last = measure
            cells = "".join(f'<td class="number">{self._summary_cell(found.get(work))}</td>' for work in works)
            lines.append(f"<tr><td>{html.escape(title)}</td>{cells}</tr>")
        if not lines:
            return ""
        head = "".join(f'<th class="number">{html.escape(self.names(work))}</th>' for work in works)
        return (f'<div class="scroll"><table class="summary"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'
                "<p>In brackets: the target.</p>")

    @staticmethod
    def _summary_cell(row):
        if row is None:
            return ""
        *_, target, ratio, reached = row
        return f"{ratio:.2f}" if target is None else f'<span class="{reached}">{ratio:.2f}</span> ({target:.2f})'

    def _sharing(self):
        """What one host has to do with these figures; always said, so that nobody takes them for those of two hosts."""
        timed = {entry["contender"] for entry in self.data["steps"]}
        if not timed:
            return ""
        private = any(contender.get("private_copies") and contender["name"] in timed
                      for contender in self.data["contenders"])
        rows = ("In the rows “private copies” it is off: there Tessera gathers too, as it does across hosts."
                if private else
                "This run has no rows with private copies, where Tessera gathers too, as it does across hosts: it was "
                "made before <code>benchmarks/run</code> measured them.")
        return ('<p class="note"><strong>One host.</strong> Tessera’s strategies that shard the optimizer share by '
                f'default (<code>"host_sharing": true</code>). {_SHARING} {rows}</p>')

    def _run(self):
        machine = self.data["machine"]
        facts = {"commit": _name_of_commit(self.data["commit"]), "command": self.data["command"],
                 "started": self.data["started"],
                 "processor": f"{machine['cpu']}, {machine['cores']} cores, {svg.size_label(machine['memory_bytes'])}",
                 "kernel": f"{machine['kernel']}; load average at the start {machine['load_average_at_start']:.2f}",
                 "versions": ", ".join(f"{name} {version}" for name, version in self.data["versions"].items()),
                 "ranks": f"{self.data['ranks']} processes of one thread; {self.data['rounds']} interleaved rounds"}
        for entry in self.data.get("later", []):
            facts[f"later: {', '.join(entry['sections'])}"] = (
                f"{_name_of_commit(entry['commit'])}; {entry['command']}; {entry['started']}; "
                f"{entry['machine']['cpu']}, {entry['machine']['cores']} cores")
        rows = "".join(f"<tr><td>{name}</td><td>{html.escape(value)}</td></tr>" for name, value in facts.items())
        checks = "".join(f"<li>{html.escape(self.names(check['work']))}: {html.escape(check['result'])}</li>"
                         for check in self.data["checks"])
        verified = f"<p>Verified in this run:</p><ul>{checks}</ul>" if checks else ""
        return "This run", f'<table class="facts">{rows}</table>{verified}'

    def _ratios(self):
        table = tables.ratios(self.results)
        if not table["rows"]:
            return ""
        parts = ["<p>The peer's median over Tessera's, both from this run; above 1 Tessera is faster, or smaller. "
                 "Peers are set against the strategy that shards the same things.</p>"]
        for measure in dict.fromkeys(row[0] for row in table["rows"]):
            of = _without_empty(table | {"rows": [row for row in table["rows"] if row[0] == measure]})
            parts.append(f"<h3>{self.names(measure)}</h3>" + _table(of, self.names, without=("measure",)))
        return "Ratios", "".join(parts)

    def _steps(self, work):
        table = _of_work(tables.steps(self.results), work["name"])
        if not table["rows"]:
            return ""
        rows, references = self._step_rows(work["name"])
        scale, unit = _bar_unit(max(row["value"] for row in rows))
        for row in rows:
            row |= {key: row[key] / scale for key in ("value", "low", "high")}
        references = [(label, value / scale) for label, value in references]
        return (f"Step time: {work['title']}",
                f"<p>{work['parameters']:,} parameters; one sample of {work['model']['seq_len']} tokens a rank, AdamW. "
                "Median; whiskers from the 10th to the 90th percentile of all timed steps. Dashed: the same work in "
                f"two processes that train at the same time without communication. {_SHARING}</p>"
                + svg.legend(self.families)
                + svg.bars(f"Step times of {work['title']}", rows, f"{unit} a step", references)
                + "<p>Exposed communication is the step less its family's step without communication; the fraction is "
                "that over the step. Gustafson efficiency: every rank brings its own batch, so the scaled speed-up "
                "over N is the step without communication over the step. Sharding the optimizer makes a rank do less "
                "than one that trains alone: then the cost may be below 0, and the efficiency above 1.</p>"
                + _table(table, self.names, without=("work",)))

    def _step_rows(self, work):
        rows, references = [], []
        for entry in self.data["steps"]:
            if entry["work"] != work:
                continue
            contender = self.results.contenders[entry["contender"]]
            of = stats.summary(self.results.step_samples(work, entry["contender"]))
            rows.append({"label": contender["label"], "family": contender["family"], "value": of["median"],
                         "low": of["p10"], "high": of["p90"], "note": svg.time_label(of["median"])})
            if contender["alone"]:
                references.append((f"{_FAMILIES[contender['family']]} alone", of["median"]))
        return rows, references

    def _memory(self, work):
        table = _of_work(tables.memory(self.results), work["name"])
        if not table["rows"]:
            return ""
        rows = []
        entries = [entry for entry in self.data["memory"] if entry["work"] == work["name"]]
        for entry, (_, label, measured, formula, ratio, *_) in zip(entries, table["rows"], strict=True):
            rows.append({"label": label, "family": self.results.contenders[entry["contender"]]["family"],
                         "value": measured / 2**20, "mark": formula / 2**20,
                         "note": f"{svg.size_label(measured)}, {ratio:.2f} x formula"})
        formulas = {"bf16": "16P, 4P+12P/N, 2P+14P/N, 16P/N", "fp32": "16P, 8P+8P/N, 4P+12P/N, 16P/N"}[work["dtype"]]
        return (f"Peak memory: {work['title']}",
                "<p>Anonymous memory plus this process's share of shared memory (PSS), its peak while training, less "
                "the peak of the same program on a model of next to nothing; mean of the ranks. Red: ZeRO's formula "
                f"for stages 0 to 3, {formulas}. Activations, buckets and gathered units come on top of it.</p>"
                + svg.legend(self.families) + svg.bars(f"Peak memory of {work['title']}", rows, "MiB a rank")
                + _table(table, self.names, without=("work",)))

    def _python(self):
        table = tables.python(self.results)
        if not table["rows"]:
            return ""
        first, *_ = entries = self.data["python"]
        rows = []
        for entry, row in zip(entries, table["rows"], strict=True):
            of = dict(zip(table["columns"], row))
            rows.append({"label": entry["label"], "family": entry["family"], "value": of["median_s"],
                         "low": of["p10_s"], "high": of["p90_s"], "note": svg.time_label(of["median_s"])})
        references = [("PyTorch alone", row["value"]) for entry, row in zip(entries, rows) if entry["alone"]]
        used = {entry["family"] for entry in entries}
        families = {family: label for family, label in _IN_PYTHON.items() if family in used}
        return ("One Python model",
                f"<p>{html.escape(first['title'])}: one PyTorch module and one loop, {first['tokens_a_rank']} tokens a "
                "rank and step, AdamW. Memory is measured as above, of those that shard everything; the baseline has "
                f"the interpreter. {_SHARING}</p>" + svg.legend(families)
                + svg.bars("Step times of one Python model", rows, "seconds a step", references)
                + _table(_without_empty(table), self.names))

    def _optimizer(self):
        table = tables.optimizer(self.results)
        if not table["rows"]:
            return ""
        return ("Optimizer step",
                "<p>AdamW over one flat tensor, one thread. “Chain for bf16” is mixed precision in PyTorch: "
                "bf16 gradients to fp32, clip_grad_norm_, fused AdamW on the masters, copy back. "
                "Tessera’s bf16 has fp32 masters too.</p>"
                + self._parameter_bars("Optimizer step", table) + self._with_avx2())

    def _with_avx2(self):
        table = tables.optimizer_avx2(self.results)
        return self._parameter_bars("Optimizer step with AVX2", table) if table["rows"] else ""

    def _parameter_bars(self, title, table):
        """Steps that differ in their numbers of parameters, as bars and as the table."""
        rows = []
        for row in table["rows"]:
            of = dict(zip(table["columns"], row))
            low, value, high = (1e9 * of[name] / of["parameters"] for name in ("p10_s", "median_s", "p90_s"))
            rows.append({"label": self.names(of["contender"]), "family": _family_of(of["contender"]), "value": value,
                         "low": low, "high": high, "note": f"{of['parameters_per_s'] / 1e9:.3g} Gparam/s"})
        return (svg.legend(self.families) + svg.bars(title, rows, "nanoseconds a parameter")
                + _table(table, self.names))

    def _collectives(self):
        table = tables.collectives(self.results)
        if not table["rows"]:
            return ""
        parts = ["<p>Full-buffer bytes over the median time, fp32. The limit makes the same reads "
                 "and writes in every rank at once, without waiting.</p>"]
        for collective in ("all_reduce", "reduce_scatter", "all_gather"):
            # In this order, so that a name has the same line in every chart.
            series = {label: [] for label in _CURVES.values()}
            for contender, name, memory, dtype, size, *_, rate, _ in table["rows"]:
                if name == collective and dtype not in ("bf16", "fp16") and size > 0:
                    series[_CURVES[contender, memory]].append((size, rate / 1e9))
            if any(series.values()):
                chart = svg.lines(f"Bandwidth of {self.names(collective)}", [{"label": label, "points": sorted(points)}
                                                                 for label, points in series.items()],
                                  "GB/s", x_label="bytes of the full buffer")
                parts.append(f"<h3>{self.names(collective)}</h3>{chart}")
        cases = f"<details><summary>All cases</summary>{_table(table, self.names)}</details>"
        return "Collectives", "".join(parts) + cases

    def _latencies(self):
        rows = []
        cases = [("Gloo", entry, [s for samples in entry["rounds_s"] for s in samples])
                 for entry in self.data["collectives"] if entry["contender"] == "gloo"]
        cases += [("Tessera", case, case["samples_s"])
                  for case in self.results.bench_collectives(memory="private")]
        cases.sort(key=lambda case: (case[1]["collective"], case[1]["bytes"], case[0]))
        for who, case, samples in cases:
            if case["bytes"] in _HISTOGRAM_BYTES:
                size = f", {svg.size_label(case['bytes'])}" if case["bytes"] else ""
                label = f"{who}, {self.names(case['collective'])}{size}"
                rows.append({"label": label, "bins": stats.log_histogram(samples),
                             "note": f"p50 {svg.time_label(stats.median(samples))}, "
                                     f"p99 {svg.time_label(stats.percentile(samples, 99))}"})
        if not rows:
            return ""
        return ("Latencies of single collectives",
                "<p>All samples, ten bins a decade. A unit's bucket is one "
                "such collective.</p>" + svg.histograms("Latencies of collectives", rows))

    def _crowded(self):
        table = tables.crowded(self.results)
        if not table["rows"]:
            return ""
        title = html.escape(self.data["crowded"][0]["title"])
        return ("More ranks than cores",
                f"<p>{title}, on {self.data['machine']['cores']} cores. Tokens a second "
                "of all ranks together, and the same over that of the fewest ranks.</p>" + _table(table, self.names))

    def _disk(self):
        table, steps = tables.disk(self.results), tables.disk_steps(self.results)
        if not table["rows"]:
            return ""
        parts = ["<p>Whole passes over one file, past the page cache; “mixed” reads every record and writes one "
                 "back for it. A swapper's step and Tessera's read and write all state of the optimizer, but for what "
                 "Tessera's cache keeps in memory, where it has one (offload.cache). Bytes of memory are those of DeepSpeed's "
                 "buffers, and of Tessera's records on their way and in the cache.</p>"]
        for kind in ("write", "read", "mixed"):
            rows = [{"label": self.names(name), "family": _family_of(name), "value": rate / 1e9,
                     "low": rate * median / high / 1e9, "high": rate * median / low / 1e9,
                     "note": f"{cpu * 1000:.0f} ms of CPU time a GiB"}
                    for name, of, _, _, _, median, low, high, rate, cpu in table["rows"] if of == kind]
            if not rows:
                continue
            parts.append(f"<h3>{kind}</h3>" + svg.bars(f"Passes over a disk: {kind}", rows, "GB/s"))
        if steps["rows"]:
            title = "Optimizer step with its state on disk"
            parts.append(f"<h3>{title}</h3>" + self._parameter_bars(title, _without_empty(steps)))
        return "Disk", "".join(parts) + _table(table, self.names)

    def _buckets(self):
        studies = tables.bucket_studies(self.results)
        if not studies:
            return ""
        parts = ["<p>NO_SHARD with buckets of gradients, over shared memory and over Gloo, beside one "
                 "collective a tensor (“one a tensor”). Communication is what a step spends in "
                 "reductions, on the rank that waits least for the others; by fit: alpha times the collectives plus "
                 "beta times the bytes.</p>"]
        for study in studies:
            alpha, beta = study["alpha_s"], study["beta_s_per_byte"]
            fit = [(size, alpha + beta * size) for size, _ in sorted(study["points"]) if alpha + beta * size > 0]
            parts.append(
                f"<h3>{html.escape(self.names(study['model']))}</h3><p>{html.escape(study['data'])}. "
                f"The best bucket is {svg.size_label(study['best_bytes'])} "
                f"({study['best_collectives']} collectives a step): {study['gain']:.2f} times as fast as one "
                f"collective a tensor, {study['communication_gain']:.2f} times in communication alone, which is "
                f"{100 * study['communication_share']:.0f} % of a step with one collective a tensor. "
                f"{self._why(alpha, beta)}</p>"
                + self._bucket_curves("Step time over bucket size", study, "samples_s", "time of a step")
                + self._bucket_curves("Communication over bucket size", study, "communication_s",
                                      "communication of a step")
                + svg.lines("Single reductions and their fit",
                            [{"label": "measured", "points": sorted(study["points"])},
                             {"label": "alpha + beta b", "points": fit}], "time", svg.time_label))
        return ("Buckets", "".join(parts) + _table(tables.buckets(self.results), self.names)
                + "<h3>Inference</h3><p>Forward passes of the trained models over held-out batches, without "
                "gradients.</p>"
                + _table(tables.inference(self.results), self.names))

    @staticmethod
    def _bucket_curves(title, study, samples, y_label):
        curve = sorted((entry["bucket_bytes"], stats.median(entry[samples])) for entry in study["sweep"])
        per_tensor = stats.median(study["all"][0][samples])
        level = [(size, per_tensor) for size, _ in curve]
        return svg.lines(title, [{"label": "buckets", "points": curve},
                                 {"label": "one collective a tensor", "points": level}],
                         y_label, svg.time_label, "bytes of a bucket")

    @staticmethod
    def _why(alpha, beta):
        fit = (f"A reduction of b bytes takes alpha + beta b with alpha = {shown('alpha_s', alpha)} and "
               f"1/beta = {1e-9 / beta:.3g} GB/s")
        if alpha <= 0:
            return f"{fit}: starting one costs nothing that can be told from the noise."
        return f"{fit}: below {svg.size_label(round(alpha / beta))} the start costs more than the bytes."

    def _timeline(self):
        if not self.data["timeline"]:
            return ""
        return ("One step",
                "<p>The last step of the trace, by rank and thread. The trace opens in Perfetto.</p>"
                + svg.timeline("Timeline of one step", self.data["timeline"]))

    def _bench_table(self, section):
        table = tables.of_bench(self.results, section)
        title, words = _BENCH[section]
        content = f"<p>{words} Made by <code>tessera bench {section}</code>.</p>{_table(table, self.names)}"
        return (title, content) if table["rows"] else ""

    def _missing(self):
        if not self.data["missing"]:
            return ""
        items = "".join(f"<li>{html.escape(entry['what'])}: {html.escape(entry['why'])}</li>"
                        for entry in self.data["missing"])
        return "Not in this run", f"<ul>{items}</ul>"


def write(data, folder):
    """Writes one CSV a table that has rows, and index.html, into `folder`. ValueError for results of another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"results of schema {data.get('schema')!r}; this is for {SCHEMA}")
    for name, table in tables.all_tables(tables.Results(data)).items():
        with open(folder / f"{name}.csv", "w", newline="") as file:
            # Lines end as the rest of the repository's do; numbers read back to the same bits.
            csv.writer(file, lineterminator="\n").writerows([table["columns"], *table["rows"]])
    (folder / "index.html").write_text(Page(data).text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write(json.loads(options.results.read_text()), options.out)


if __name__ == "__main__":
    sys.exit(main())
