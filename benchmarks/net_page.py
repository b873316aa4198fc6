#!/usr/bin/env python3
"""Writes net.csv and the page (index.html) of a network run's results.json; nothing is measured here. Standard library
only.

    net_page.py results.json --out DIR

results.json, made by benchmarks/run_net, is one object:

    schema, quick, command, started, seconds, commit {hash, dirty}, machine {...}, processor, versions {...}
    hosts, ranks_per_host, rounds, timed_steps, warm_up_steps, rates     rates as tc writes them, or "unlimited"
    work         {name, title, model, dtype, parameters}
    contenders   [{name, family, label, group, alone, compressed}]
    wire         [{rate, round, one_way, both_ways}]         bytes a second, by net_wire.py
    steps        [{rate, contender, rounds: [{round, samples_s, losses, link_bytes: {sent, received} or null}]}]
    predicted    [{rate, contender, round, seconds}]         a step, by `tessera plan`; with --predict
    failed       [{rate, contender, round, why}]             contender "wire": the wire's own speed; "predicted"
    missing      [{what, why}]
"""

import argparse
import csv
import html
import json
import pathlib
import sys

import net_tables
import report
import svg

SCHEMA = 1
_FAMILIES = {"tessera": "Tessera", "python": "Tessera in Python", "torch": "PyTorch", "deepspeed": "DeepSpeed"}
# (group, further contenders it is compared with, title): a chart each. A chart has six kinds of lines.
_CHARTS = (("replicated", ("torch_alone", "tessera_alone"), "Parameters on every rank"),
           ("sharded", (), "Parameters sharded"),
           ("python", ("torch_alone", "torch_ddp", "torch_fsdp2", "deepspeed_zero3"), "One Python model"),
           ("compressed", ("torch_ddp", "tessera_no_shard"), "Less on the wire"))
_HEADINGS = {"contender": "who", "samples": "rounds", "median_s": "step, median", "p10_s": "10th percentile",
             "p90_s": "90th percentile", "over_ddp": "over DDP", "over_fsdp2": "over FSDP2", "exposed_s": "exposed",
             "link_bytes": "on the link", "wire_s": "wire alone", "predicted_s": "predicted", "predicted_off": "off by"}
_OWN_STYLE = ".summary td:nth-child(2) { white-space: nowrap; }"
_EXPLAINED = (
    "A sample is the median of the timed steps of one run of a contender, one a round; the percentiles are those of "
    "samples. A ratio is the median over the rounds of the ratios within a round. Exposed: the step less that of one "
    "rank alone, with Tessera or with PyTorch. On the link: bytes that the busiest host's link carried in a step, in "
    "its busier direction, headers included. Wire alone: those bytes over the speed that one connection reaches on "
    "the same link in the same run, both ways at once. Where exposed is less than that, communication is hidden. "
    "Predicted: by `tessera plan`, from links and profiles that were measured in the same rounds.")
_NETWORK = (
    "The hosts are network namespaces of one machine: links have the rate that is said and next to no latency, and "
    "what sends and receives takes time of the same cores that compute. What ranks take from each other’s memory "
    "bandwidth is in “exposed”, since one rank alone has all of it.")


def rate_label(rate):
    """10 Gbit/s."""
    bits = net_tables.bits_per_s(rate)
    return "no limit" if bits is None else bits_label(bits)


def bits_label(bits):
    factor, unit = next((factor, unit) for factor, unit in ((10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s"),
                                                            (1, "bit/s")) if bits >= factor)
    return f"{bits / factor:g} {unit}"


def _counted(count, word):
    return f"{count} {word}" + ("" if count == 1 else "s")


def _table(headings, rows, kind=""):
    """Cells are text, and numbers already written as text in a pair (text, class)."""
    def cell(tag, content):
        words, classes = content if isinstance(content, tuple) else (content, "")
        return f'<{tag}{f" class={chr(34)}{classes}{chr(34)}" if classes else ""}>{html.escape(words)}</{tag}>'

    lines = "".join("<tr>" + "".join(cell("td", content) for content in row) + "</tr>" for row in rows)
    head = "".join(cell("th", content) for content in headings)
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{lines}</table></div>'


class Page:
    def __init__(self, data):
        self.data = data
        self.results = net_tables.Results(data)
        self.families = {family: label for family, label in _FAMILIES.items()
                         if any(contender["family"] == family for contender in data["contenders"])}

    def text(self):
        sections = [self._targets(), self._curves(), *map(self._rate, self.data["rates"]), self._missing(), self._run()]
        body = self._summary() + "".join(f'<h2 id="{report.anchor(title)}">{html.escape(title)}</h2>{content}'
                                         for title, content in sections if content)
        return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
                '<meta name="viewport" content="width=device-width"><title>Tessera: steps over a network</title>'
                f"<style>{report.STYLE}{_OWN_STYLE}</style></head><body>{svg.DEFINITIONS}{body}</body></html>\n")

    def _summary(self):
        data, work = self.data, self.data["work"]
        quick = "<p><strong>A smoke test: its figures mean nothing.</strong></p>" if data["quick"] else ""
        return (f"<h1>Training steps over a network</h1>{quick}<p>{data['hosts']} hosts with "
                f"{_counted(data['ranks_per_host'], 'rank')} of one thread each. "
                f"{html.escape(work['title'])}: {work['parameters']:,} parameters, one sequence of "
                f"{work['model']['seq_len']} tokens a rank and step, AdamW; PowerSGD has rank 4. "
                f"{_counted(data['rounds'], 'round')} a rate, in which every contender in turn trains "
                f"{_counted(data['warm_up_steps'], 'step')} and then {data['timed_steps']} that are timed.</p>"
                f'<p class="note"><strong>One machine.</strong> {_NETWORK}</p>')

    def _targets(self):
        rows = []
        for of in net_tables.judged(self.results):
            what = "step" if of["measure"] == "step" else "exposed communication"
            met = ("not measured", "") if of["met"] is None else ("yes", "yes") if of["met"] else ("no", "no")
            value = "" if of["ratio"] is None else f"{of['ratio']:.3f}"
            rows.append((f"{of['ours']} over {of['peer']}", what, bits_label(of["bits_per_s"]),
                         (f"{of['target']:.2f}", "number"), (value, "number"), met))
        for what, value, target in self._predictions():
            met = ("yes", "yes") if value <= target else ("no", "no")
            rows.append((f"Predicted beside measured, {what}", "step", "all", (f"{target:.2f}", "number"),
                         (f"{value:.3f}", "number"), met))
        headings = ("", "of", "rate", ("at most", "number"), ("measured", "number"), "met")
        return "Targets", _table(headings, rows, "summary")

    def _predictions(self):
        off = self.results.predictions_off()
        if not off:
            return []
        return [(f"the farthest off of {len(off)}", max(off), net_tables.PREDICTED_WITHIN),
                ("median", net_tables.stats.median(off), net_tables.PREDICTED_MEDIAN)]

    def _curves(self):
        parts = ["<p>Median step over what the link carries each way, as measured; both axes are logarithmic. Rates: "
                 + html.escape(self._speeds()) + ".</p>"]
        for group, others, title in _CHARTS:
            names = [name for name, contender in self.results.contenders.items()
                     if contender["group"] == group or name in others]
            series = [{"label": self.results.label(name), "points": self._curve(name)} for name in names]
            if any(entry["points"] for entry in series):
                chart = svg.lines(f"Step time over the rate: {title}", series, "time of a step", svg.time_label,
                                  "bytes a second each way")
                parts.append(f"<h3>{title}</h3>{chart}")
        return "Step time and rate", "".join(parts) if len(parts) > 1 else ""

    def _speeds(self):
        speeds = ((rate_label(rate), self.results.wire_bytes_per_s(rate)) for rate in self.data["rates"])
        return "; ".join(f"{label} is " + (f"{speed / 1e6:,.0f} MB/s" if speed else "not measured")
                         for label, speed in speeds)

    def _curve(self, name):
        rows = [self.results.row(rate, name) for rate in self.data["rates"]]
        return sorted((row["wire_bytes_per_s"], row["median_s"]) for row in rows if row and row["wire_bytes_per_s"])

    def _rate(self, rate):
        rows = {name: self.results.row(rate, name) for name in self.results.contenders}
        rows = {name: row for name, row in rows.items() if row}
        if not rows:
            return "", ""
        speed = self.results.wire_bytes_per_s(rate)
        words = (f"<p>One connection carries {speed / 1e6:,.0f} MB/s each way. The mark is the longer of computing "
                 "alone and the wire alone: the step if the other were hidden.</p>" if speed else "")
        columns = [column for column in _HEADINGS if any(row[column] is not None for row in rows.values())]
        cells = [[self._cell(name, column, row[column]) for column in columns] for name, row in rows.items()]
        headings = [(_HEADINGS[column], "" if column == "contender" else "number") for column in columns]
        explained = f"<p>{_EXPLAINED}</p>" if rate == self.data["rates"][0] else ""
        return (f"At {rate_label(rate)}", words + svg.legend(self.families)
                + svg.bars(f"Step times at {rate_label(rate)}", [self._bar(name, row) for name, row in rows.items()],
                           "seconds a step") + explained + _table(headings, cells))

    def _bar(self, name, row):
        bar = {"label": row["contender"], "family": self.results.contenders[name]["family"], "value": row["median_s"],
               "low": row["p10_s"], "high": row["p90_s"], "note": svg.time_label(row["median_s"])}
        limits = [row[column] for column in ("alone_s", "wire_s") if row[column]]
        return bar | {"mark": max(limits)} if len(limits) == 2 else bar

    def _cell(self, name, column, value):
        if column == "contender":
            return value + (" (less on the wire)" if self.results.contenders[name]["compressed"] else "")
        if column == "predicted_off" and value is not None:
            return f"{100 * value:+.1f} %", "number"
        if value is not None and column.startswith("over_"):
            return f"{value:.3f}", "number"
        return report.shown(column, value), "number"

    def _missing(self):
        items = [(entry["what"], entry["why"]) for entry in self.data["missing"]]
        items += [(f"{self.results.label(entry['contender'])} at {rate_label(entry['rate'])}, round {entry['round']}",
                   entry["why"]) for entry in self.data["failed"]]
        lines = "".join(f"<li>{html.escape(what)}: {self._reason(why)}</li>" for what, why in items)
        return "Not in this run, or failed", f"<ul>{lines}</ul>" if items else ""

    @staticmethod
    def _reason(why):
        first, *rest = why.strip().splitlines()
        details = f"<details><summary>what it said</summary><pre>{html.escape(chr(10).join(rest))}</pre></details>"
        return html.escape(first) + (details if rest else "")

    def _run(self):
        data, machine = self.data, self.data["machine"]
        commit = data["commit"]["hash"] + (" with uncommitted changes" if data["commit"]["dirty"] else "")
        facts = {"commit": commit, "command": data["command"], "started": data["started"],
                 "took": f"{data['seconds'] / 60:.1f} minutes", "processor": data["processor"],
                 "memory": svg.size_label(machine["memory_bytes"]),
                 "kernel": f"{machine['kernel']}; load average at the start {machine['load_average_at_start']:.2f}",
                 "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
                 "model": json.dumps(data["work"]["model"])}
        return "This run", _table(("", ""), facts.items(), "facts")


def write(data, folder):
    """Writes net.csv and index.html into `folder`. ValueError for results of another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"results of schema {data.get('schema')!r}; this is for {SCHEMA}")
    table = net_tables.table(net_tables.Results(data))
    with open(folder / "net.csv", "w", newline="") as file:
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
