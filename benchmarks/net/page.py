"""Makes a network run's net.csv and its page (index.html), whose charts matplotlib draws."""

import html
import json

import page
import plots
import tables as all_tables
import targets
from net import tables
from net.rates import bits_label, rate_label
from page import number
from readable import counted, shown, time_label
from stats import median

_FAMILIES = {"tessera": "Tessera", "python": "Tessera in Python", "torch": "PyTorch", "deepspeed": "DeepSpeed"}
# Each entry is a chart: (group, further contenders with which the group is compared, title).
_CHARTS = (("replicated", ("torch_alone", "tessera_alone"), "Parameters on every rank"),
           ("sharded", (), "Parameters sharded"),
           ("python", ("torch_alone", "torch_ddp", "torch_fsdp2", "deepspeed_zero3"), "One Python model"),
           ("compressed", ("torch_ddp", "tessera_no_shard"), "Less on the wire"))
_HEADINGS = {"contender": "who", "samples": "rounds", "median_s": "step, median", "p10_s": "10th percentile",
             "p90_s": "90th percentile", "over_ddp": "over DDP", "over_fsdp2": "over FSDP2", "exposed_s": "exposed",
             "link_bytes": "on the link", "wire_s": "wire alone", "predicted_s": "predicted", "predicted_off": "off by"}
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


class Page:
    """Makes index.html. Its sections are methods, in order."""

    def __init__(self, data):
        self.data = data
        self.run, = data["runs"]
        self.results = tables.NetResults(data)
        self.families = {family: label for family, label in _FAMILIES.items()
                         if any(contender["family"] == family for contender in data["contenders"])}

    def text(self):
        return page.document(self.data, "Tessera: steps over a network", "Training steps over a network", self._summary(), [
            self._targets(), self._curves(), *map(self._rate, self.results.rates), page.missing(self.data),
            page.this_run(self.data, [("model", json.dumps(self.data["works"][0]["model"]))])])

    def _summary(self):
        run, work = self.run, self.data["works"][0]
        return (f"<p>{run['hosts']} hosts with "
                f"{counted(run['ranks_per_host'], 'rank')} of one thread each. "
                f"{html.escape(work['title'])}: {work['parameters']:,} parameters, one sequence of "
                f"{work['model']['seq_len']} tokens a rank and step, AdamW; PowerSGD has rank 4. "
                f"{counted(run['rounds'], 'round')} a rate, in which every contender in turn trains "
                f"{counted(work['warm_up'], 'step')} and then {work['steps']} that are timed.</p>"
                f'<p class="note"><strong>One machine.</strong> {_NETWORK}</p>')

    def _targets(self):
        rows = [[f"{of['ours']} over {of['peer']}", "step" if of["measure"] == "step" else "exposed communication",
                 bits_label(of["bits_per_s"]), number(f"{of['target']:.2f}"), number("" if of["ratio"] is None else f"{of['ratio']:.3f}"),
                 self._met(of["met"])] for of in tables.judged(self.results)]
        off = self.results.predictions_off()
        for what, value, target in ((f"the farthest off of {len(off)}", max(off), targets.PREDICTED_WITHIN),
                                    ("median", median(off), targets.PREDICTED_MEDIAN)) if off else ():
            rows.append([f"Predicted beside measured, {what}", "step", "all", number(f"{target:.2f}"), number(f"{value:.3f}"),
                         self._met(value <= target)])
        return "Targets", page.html_table(("", "of", "rate", number("at most"), number("measured"), "met"), rows, "summary")

    @staticmethod
    def _met(met):
        return {None: "not measured", True: ("yes", "yes"), False: ("no", "no")}[met]

    def _curves(self):
        parts = []
        for group, others, title in _CHARTS:
            series = [{"label": contender["label"], "points": self._curve(name)}
                      for name, contender in self.results.contenders.items() if contender["group"] == group or name in others]
            if any(entry["points"] for entry in series):
                name = f"Step time over the rate: {title}"
                chart = plots.lines(series, "time of a step", time_label, "bytes a second each way")
                parts.append(f"<h3>{title}</h3>{plots.svg(chart, name)}")
        speeds = ((rate_label(rate), self.results.wire_bytes_per_s(rate)) for rate in self.results.rates)
        speeds = "; ".join(f"{label} is " + (f"{speed / 1e6:,.0f} MB/s" if speed else "not measured") for label, speed in speeds)
        words = ("<p>Median step over what the link carries each way, as measured; both axes are logarithmic. Rates: "
                 f"{html.escape(speeds)}.</p>")
        return "Step time and rate", words + "".join(parts) if parts else ""

    def _curve(self, name):
        rows = [self.results.row(rate, name) for rate in self.results.rates]
        return sorted((row["wire_bytes_per_s"], row["median_s"]) for row in rows if row and row["wire_bytes_per_s"])

    def _rate(self, rate):
        rows = {name: row for name in self.results.contenders if (row := self.results.row(rate, name))}
        title = f"At {rate_label(rate)}"
        if not rows:
            return title, ""
        speed = self.results.wire_bytes_per_s(rate)
        words = (f"<p>One connection carries {speed / 1e6:,.0f} MB/s each way. The mark is the longer of computing "
                 "alone and the wire alone: the step if the other were hidden.</p>" if speed else "")
        columns = [column for column in _HEADINGS if any(row[column] is not None for row in rows.values())]
        headings = [_HEADINGS[column] if column == "contender" else number(_HEADINGS[column]) for column in columns]
        cells = [[self._cell(row, column) for column in columns] for row in rows.values()]
        explained = f"<p>{_EXPLAINED}</p>" if rate == self.results.rates[0] else ""
        chart = plots.bars([self._bar(name, row) for name, row in rows.items()], "seconds a step", self.families)
        return title, words + plots.svg(chart, f"Step times at {rate_label(rate)}") + explained + page.html_table(headings, cells)

    def _bar(self, name, row):
        bar = {"label": row["contender"], "family": self.results.contenders[name]["family"], "value": row["median_s"],
               "low": row["p10_s"], "high": row["p90_s"], "note": time_label(row["median_s"])}
        limits = [row[column] for column in ("alone_s", "wire_s") if row[column]]
        return bar | {"mark": max(limits)} if len(limits) == 2 else bar

    @staticmethod
    def _cell(row, column):
        value = row[column]
        if column == "contender":
            return value + (" (less on the wire)" if row["compressed"] else "")
        if value is not None and column == "predicted_off":
            return number(f"{100 * value:+.1f} %")
        if value is not None and column.startswith("over_"):
            return number(f"{value:.3f}")
        return number(shown(column, value))


def write(data, folder, _name=None):
    """Writes net.csv and index.html."""
    all_tables.write_csv({"net": tables.table(tables.NetResults(data))}, folder)
    (folder / "index.html").write_text(Page(data).text())
