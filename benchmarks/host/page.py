"""Makes a host's tables (CSV) and its page (index.html), whose charts matplotlib draws."""

import html

import page
import plots
import stats
import tables as all_tables
import targets
from host import tables
from page import number
from readable import Names, listed, shown, size_label, time_label

_FAMILIES = {"tessera": "Tessera", "torch": "PyTorch", "deepspeed": "DeepSpeed"}
_IN_PYTHON = {"python": "Tessera in Python", "torch": "PyTorch", "deepspeed": "DeepSpeed"}
# Maps (contender, memory) of a collective to the name of its curve.
_CURVES = {("tessera", "private"): "Tessera, private memory", ("tessera", "group"): "Tessera, the group's memory",
           ("tessera", "common"): "Tessera, common memory", ("gloo", "private"): "Gloo",
           ("limit", "private"): "memory limit"}
_HISTOGRAM_BYTES = (0, 4, 1 << 20, 1 << 24)
# These are the titles of the tables of `tessera bench`, with a description of each table.
_BENCH = {"step": ("The strategies' steps", "Where a step's time goes under each strategy."),
          "memory": ("The strategies' memory", "What is planned, allocated and measured under each strategy."),
          "overhead": ("What the Engine costs an operator", "The time of one small operator under the operator watch.")}
_FORMULAS = {"bf16": "16P, 4P+12P/N, 2P+14P/N, 16P/N", "fp32": "16P, 8P+8P/N, 4P+12P/N, 16P/N"}
_SHARING = ("With ranks of one host sharing one copy of the parameters nothing is gathered, while FSDP2 and DeepSpeed "
            "gather.")


def _family_of(contender):
    """Returns the family of a contender in charts that do not show training steps. Contenders that are
    neither Tessera's nor DeepSpeed's are drawn as those of PyTorch."""
    return next((family for family in ("tessera", "deepspeed") if contender.startswith(family)), "torch")


def _of_work(table, work):
    return table | {"rows": [row for row in table["rows"] if row[0] == work]}


def _times_bar(label, family, of):
    """`of`: a row of the table TIMES, as {column: cell}."""
    return {"label": label, "family": family, "value": of["median_s"], "low": of["p10_s"], "high": of["p90_s"],
            "note": time_label(of["median_s"])}


class Page:
    """The sections of index.html, in order. Sections without data are left out; the section before the last one lists
    them with the reason."""

    def __init__(self, data):
        self.data = data
        self.results = tables.HostResults(data)
        self.names = Names(data)
        self.ratios = tables.ratios(self.results)
        self.cores = data["runs"][0]["machine"]["cores"]
        self.families = self._those_of(self.results.compared, _FAMILIES)

    def _those_of(self, works, families):
        """Returns {family: label} of the contenders that train one of the workloads `works`."""
        used = {self.results.contenders[entry["contender"]]["family"] for entry in self.data["steps"] if entry["work"] in works}
        return {family: label for family, label in families.items() if family in used} or families

    def text(self):
        works = self.results.compared.values()
        return page.document(self.data, "Tessera: benchmarks", "Tessera beside its peers", self._summary(), [
            self._ratios(), *map(self._steps, works), *map(self._memory, works), self._python(), self._optimizer(),
            self._collectives(), self._latencies(), self._crowded(), self._disk(), self._buckets(), self._timeline(),
            *map(self._bench_table, _BENCH), page.missing(self.data), self._run()])

    def _table(self, table, without=()):
        return page.of_table(table, self.names, without)

    def _summary(self):
        setting = (f"<p>{self.results.ranks} ranks of one thread on one host with {self.cores} cores, all "
                   "contenders in turn in one run. A ratio is the peer's median over Tessera's: above 1 Tessera is "
                   "faster, or smaller.</p>")
        rows = self.ratios["rows"]
        return setting + self._beside_fsdp2(rows) + self._reached(rows) + self._summary_table(rows) + self._sharing()

    def _beside_fsdp2(self, rows):
        pair = [self.results.label(name) for name in ("torch_fsdp2", "tessera_full_shard")]
        times, sizes = ([f"{row[6]:.1f}" for row in rows if row[0] == measure and row[3:5] == pair]
                        for measure in ("step", "peak_memory"))
        if not times:
            return ""
        memory = f"; the peak memory of a rank is smaller by the factors {listed(sizes)}" if sizes else ""
        return (f"<p>A step of {pair[1]} is faster than one of {pair[0]} by the factors {listed(times)}"
                f"{memory} (one factor a model that was trained).</p>")

    def _reached(self, rows):
        judged = [row for row in rows if row[-1]]
        missed = [f"{self._ratio_name(row)}: {row[6]:.3g} of {row[5]:.3g}" for row in judged if row[-1] == "no"]
        details = f"<details><summary>The targets that are missed</summary>{page.html_list(missed)}</details>" if missed else ""
        return f"<p>Of {len(judged)} targets {len(judged) - len(missed)} are reached.</p>{details}" if judged else ""

    def _ratio_name(self, row):
        measure, subject, size, peer, tessera = row[:5]
        of = self.names(subject) + (f", {size_label(size)}" if size else "") if subject else self.names(tessera)
        return f"{self.names(measure)}, {of}, beside {self.names(peer)}"

    def _summary_table(self, rows):
        """Makes a table with one row for each comparison and one column for each work. A cell has the ratio, and the
        target if there is one."""
        lines = []
        for title, measure, peer, ours in targets.SUMMARY:
            key = [measure, self.results.label(peer), self.results.label(ours)]
            found = {row[1]: row for row in rows if [row[0], *row[3:5]] == key}
            if found:
                lines.append([self.names(measure), title, *(self._summary_cell(found.get(work)) for work in self.results.compared)])
        table = page.html_table(["", "", *(number(self.names(work)) for work in self.results.compared)], lines, "summary")
        return f"{table}<p>In brackets: the target.</p>" if lines else ""

    @staticmethod
    def _summary_cell(row):
        if row is None:
            return ""
        *_, target, ratio, reached = row
        return number(f"{ratio:.2f}") if target is None else (f"{ratio:.2f} ({target:.2f})", f"number {reached}")

    def _sharing(self):
        """Returns a note that all ranks were on one host. The page always has this note, so that no reader takes the
        figures for those of two hosts."""
        timed = {entry["contender"] for entry in self.data["steps"] if entry["work"] in self.results.compared}
        if not timed:
            return ""
        rows = ("In the rows “private copies” it is off: there Tessera gathers too, as it does across hosts."
                if any(self.results.contenders[name]["private_copies"] for name in timed) else
                "This run has no rows with private copies, where Tessera gathers too, as it does across hosts.")
        return ('<p class="note"><strong>One host.</strong> Tessera’s strategies that shard the optimizer share by '
                f'default (<code>"host_sharing": true</code>). {_SHARING} {rows}</p>')

    def _run(self):
        verified = page.html_list(page.checked(self.data, self.names))
        return page.this_run(self.data, behind=verified and f"<p>Verified in this run:</p>{verified}")

    def _ratios(self):
        parts = ["<p>The peer's median over Tessera's, both from this run; above 1 Tessera is faster, or smaller. "
                 "Peers are set against the strategy that shards the same things.</p>"]
        for measure in dict.fromkeys(all_tables.column(self.ratios, "measure")):
            of = page.without_empty(self.ratios | {"rows": [row for row in self.ratios["rows"] if row[0] == measure]})
            parts.append(f"<h3>{self.names(measure)}</h3>" + self._table(of, without=("measure",)))
        return "Ratios", "".join(parts) if len(parts) > 1 else ""

    def _step_bars(self, title, work, families):
        """Draws all contenders that trained the workload. Contenders without communication are dashed."""
        rows, references = [], []
        for entry in self.results.entries("steps", work=work):
            contender = self.results.contenders[entry["contender"]]
            of = dict(zip(all_tables.TIMES, all_tables.times(self.results.step_samples(work, entry["contender"]))))
            rows.append(_times_bar(contender["label"], contender["family"], of))
            if self.results.is_alone(entry["contender"]):
                references.append((f"{_FAMILIES[contender['family']]} alone", of["median_s"]))
        scale, unit = (1.0, "seconds") if max(row["value"] for row in rows) >= 1 else (1e-3, "milliseconds")
        rows = [row | {key: row[key] / scale for key in ("value", "low", "high")} for row in rows]
        references = [(label, value / scale) for label, value in references]
        return plots.svg(plots.bars(rows, f"{unit} a step", families, references), title)

    def _steps(self, work):
        table = _of_work(tables.steps(self.results), work["name"])
        if not table["rows"]:
            return None
        return (f"Step time: {work['title']}",
                f"<p>{work['parameters']:,} parameters; one sample of {work['model']['seq_len']} tokens a rank, AdamW. "
                "Median; whiskers from the 10th to the 90th percentile of all timed steps. Dashed: the same work in "
                f"two processes that train at the same time without communication. {_SHARING}</p>"
                + self._step_bars(f"Step times of {work['title']}", work["name"], self.families)
                + "<p>Exposed communication is the step less its family's step without communication; the fraction is "
                "that over the step. Gustafson efficiency: every rank brings its own batch, so the scaled speed-up "
                "over N is the step without communication over the step. Sharding the optimizer makes a rank do less "
                "than one that trains alone: then the cost may be below 0, and the efficiency above 1.</p>"
                + self._table(table, without=("work",)))

    def _memory(self, work):
        table = _of_work(tables.memory(self.results), work["name"])
        if not table["rows"]:
            return None
        rows = [{"label": label, "family": self.results.contenders[entry["contender"]]["family"], "value": measured / 2**20,
                 "mark": formula / 2**20, "note": f"{size_label(measured)}, {ratio:.2f} x formula"}
                for entry, (_, label, measured, formula, ratio, *_) in zip(self.results.entries("memory", work=work["name"]),
                                                                           table["rows"], strict=True)]
        return (f"Peak memory: {work['title']}",
                "<p>Anonymous memory plus this process's share of shared memory (PSS), its peak while training, less "
                "the peak of the same program on a model of next to nothing; mean of the ranks. Red: ZeRO's formula "
                f"for stages 0 to 3, {_FORMULAS[work['dtype']]}. Activations, buckets and gathered units come on top of it.</p>"
                + plots.svg(plots.bars(rows, "MiB a rank", self.families), f"Peak memory of {work['title']}")
                + self._table(table, without=("work",)))

    def _python(self):
        table, work = tables.python(self.results), self.results.works.get("python")
        if not table["rows"]:
            return None
        return ("One Python model",
                f"<p>{html.escape(work['title'])}: one PyTorch module and one loop, {work['model']['seq_len']} tokens a "
                "rank and step, AdamW. Memory is measured as above, of those that shard everything; the baseline has "
                f"the interpreter. {_SHARING}</p>"
                + self._step_bars("Step times of one Python model", "python", self._those_of(["python"], _IN_PYTHON))
                + self._table(page.without_empty(table)))

    def _optimizer(self):
        parts = [self._parameter_bars(title, table) for title, table in (
            ("Optimizer step", tables.optimizer(self.results)), ("Optimizer step with AVX2", tables.optimizer_avx2(self.results)))]
        return ("Optimizer step",
                "<p>AdamW over one flat tensor, one thread. “Chain for bf16” is mixed precision in PyTorch: "
                "bf16 gradients to fp32, clip_grad_norm_, fused AdamW on the masters, copy back. "
                "Tessera’s bf16 has fp32 masters too.</p>" + "".join(parts) if any(parts) else "")

    def _parameter_bars(self, title, table):
        """Shows optimizer steps with different numbers of parameters, both as bars of the time per parameter and as the
        table."""
        rows = []
        for row in table["rows"]:
            of = dict(zip(table["columns"], row))
            low, value, high = (1e9 * of[name] / of["parameters"] for name in ("p10_s", "median_s", "p90_s"))
            rows.append({"label": self.names(of["contender"]), "family": _family_of(of["contender"]), "value": value,
                         "low": low, "high": high, "note": f"{of['parameters_per_s'] / 1e9:.3g} Gparam/s"})
        if not rows:
            return ""
        return plots.svg(plots.bars(rows, "nanoseconds a parameter", self.families), title) + self._table(page.without_empty(table))

    def _collectives(self):
        table = tables.collectives(self.results)
        parts = []
        for collective in ("all_reduce", "reduce_scatter", "all_gather"):
            # The order is fixed, so that a name has the same line style in every chart.
            series = {label: [] for label in _CURVES.values()}
            for contender, name, memory, dtype, size, *_, rate, _ in table["rows"]:
                if name == collective and dtype not in ("bf16", "fp16") and size > 0:
                    series[_CURVES[contender, memory]].append((size, rate / 1e9))
            if any(series.values()):
                chart = plots.lines([{"label": label, "points": sorted(points)} for label, points in series.items()], "GB/s",
                                    x_label="bytes of the full buffer")
                name = self.names(collective)
                parts.append(f"<h3>{name}</h3>{plots.svg(chart, f'Bandwidth of {name}')}")
        cases = f"<details><summary>All cases</summary>{self._table(table)}</details>"
        return ("Collectives", "<p>Full-buffer bytes over the median time, fp32. The limit makes the same reads "
                "and writes in every rank at once, without waiting.</p>" + "".join(parts) + cases if table["rows"] else "")

    def _latencies(self):
        cases = [("Gloo", entry, [s for samples in entry["rounds_s"] for s in samples])
                 for entry in self.results.entries("collectives", contender="gloo")]
        cases += [("Tessera", case, case["samples_s"]) for case in self.results.bench_collectives(memory="private")]
        cases = sorted((case for case in cases if case[1]["bytes"] in _HISTOGRAM_BYTES),
                       key=lambda case: (case[1]["collective"], case[1]["bytes"], case[0]))
        rows = [{"label": f"{who}, {self.names(case['collective'])}" + (f", {size_label(case['bytes'])}" if case["bytes"] else ""),
                 "bins": stats.log_histogram(samples),
                 "note": f"p50 {time_label(stats.median(samples))}, p99 {time_label(stats.percentile(samples, 99))}"}
                for who, case, samples in cases]
        return ("Latencies of single collectives",
                "<p>All samples that were kept, ten bins a decade. A unit's bucket is one "
                "such collective.</p>" + plots.svg(plots.histograms(rows), "Latencies of collectives") if rows else "")

    def _crowded(self):
        table, work = tables.crowded(self.results), self.results.works.get("crowded")
        return ("More ranks than cores",
                f"<p>{html.escape(work['title'])}, on {self.cores} cores. Tokens a second "
                "of all ranks together, and the same over that of the fewest ranks.</p>" + self._table(table) if table["rows"] else "")

    def _disk(self):
        table, steps = tables.disk(self.results), tables.disk_steps(self.results)
        if not table["rows"]:
            return None
        parts = ["<p>Whole passes over one file, past the page cache; “mixed” reads every record and writes one "
                 "back for it. A swapper's step and Tessera's read and write all state of the optimizer, but for what "
                 "Tessera's cache keeps in memory, where it has one (offload.cache). Bytes of memory are those of DeepSpeed's "
                 "buffers, and of Tessera's records on their way and in the cache.</p>"]
        for kind in dict.fromkeys(all_tables.column(table, "pass")):
            rows = [{"label": self.names(name), "family": _family_of(name), "value": rate / 1e9,
                     "low": rate * median / high / 1e9, "high": rate * median / low / 1e9,
                     "note": f"{cpu * 1000:.0f} ms of CPU time a GiB"}
                    for name, of, _, _, _, median, low, high, rate, cpu in table["rows"] if of == kind]
            parts.append(f"<h3>{kind}</h3>" + plots.svg(plots.bars(rows, "GB/s", self.families), f"Passes over a disk: {kind}"))
        if steps["rows"]:
            parts.append(f"<h3>{steps['title']}</h3>{self._parameter_bars(steps['title'], steps)}")
        return "Disk", "".join(parts) + self._table(table)

    def _buckets(self):
        studies = tables.bucket_studies(self.results)
        if not studies:
            return None
        parts = ["<p>NO_SHARD with buckets of gradients, over shared memory and over Gloo, beside one "
                 "collective a tensor (“one a tensor”). Communication is what a step spends in "
                 "reductions, on the rank that waits least for the others; by fit: alpha times the collectives plus "
                 "beta times the bytes.</p>"]
        for study in studies:
            name, best, alpha, beta = self.names(study["model"]), study["best"], study["alpha_s"], study["beta_s_per_byte"]
            fit = [(size, alpha + beta * size) for size, _ in sorted(study["points"]) if alpha + beta * size > 0]
            fitted = plots.lines([{"label": "measured", "points": sorted(study["points"])}, {"label": "alpha + beta b", "points": fit}],
                                 "time", time_label)
            parts.append(
                f"<h3>{html.escape(name)}</h3><p>{html.escape(study['data'])}. "
                f"The best bucket is {size_label(best['bucket_bytes'])} "
                f"({best['collectives']} collectives a step): {best['gain']:.2f} times as fast as one "
                f"collective a tensor, {best['communication_gain']:.2f} times in communication alone, which is "
                f"{100 * study['communication_share']:.0f} % of a step with one collective a tensor. "
                f"{self._why(alpha, beta)}</p>"
                + self._bucket_curves(f"Step time over bucket size, {name}", study, "samples_s", "time of a step")
                + self._bucket_curves(f"Communication over bucket size, {name}", study, "communication_s",
                                      "communication of a step")
                + plots.svg(fitted, f"Single reductions and their fit, {name}"))
        return ("Buckets", "".join(parts) + self._table(tables.buckets(self.results))
                + "<h3>Inference</h3><p>Forward passes of the trained models over held-out batches, without "
                "gradients.</p>" + self._table(tables.inference(self.results)))

    @staticmethod
    def _bucket_curves(title, study, samples, y_label):
        per_tensor, *sweep = study["all"]
        curve = sorted((entry["bucket_bytes"], stats.median(entry[samples])) for entry in sweep)
        level = [(size, stats.median(per_tensor[samples])) for size, _ in curve]
        return plots.svg(plots.lines([{"label": "buckets", "points": curve}, {"label": "one collective a tensor", "points": level}],
                                     y_label, time_label, "bytes of a bucket"), title)

    @staticmethod
    def _why(alpha, beta):
        fit = (f"A reduction of b bytes takes alpha + beta b with alpha = {shown('alpha_s', alpha)} and "
               f"1/beta = {1e-9 / beta:.3g} GB/s")
        if alpha <= 0:
            return f"{fit}: starting one costs nothing that can be told from the noise."
        return f"{fit}: below {size_label(round(alpha / beta))} the start costs more than the bytes."

    def _timeline(self):
        events = self.data.get("timeline")
        return ("One step", "<p>The last step of the trace, by rank and thread. The trace opens in Perfetto.</p>"
                + plots.svg(plots.timeline(events), "Timeline of one step") if events else "")

    def _bench_table(self, section):
        table = tables.of_bench(self.results, section)
        title, words = _BENCH[section]
        return title, f"<p>{words} Made by <code>tessera bench {section}</code>.</p>{self._table(table)}" if table["rows"] else ""


def write(data, folder, _name=None):
    """Writes one CSV file for each table that has rows, and index.html."""
    all_tables.write_csv(tables.all_tables(tables.HostResults(data)), folder)
    (folder / "index.html").write_text(Page(data).text())
