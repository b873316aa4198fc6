"""The tables of a host's results, for the CSV files and the page. It uses the standard library only."""

import stats
import targets
from memory import formula_bytes
from results import Results
from tables import TIMES, ratio, reached, times

_MEMORY_KINDS = {"private": "Tessera, private memory", "group": "Tessera, the group's memory"}
_APART = ("python", "crowded")  # workloads that have separate tables


class HostResults(Results):
    def __init__(self, data):
        super().__init__(data)
        self.ranks = data["runs"][0]["ranks"]
        self.compared = {name: work for name, work in self.works.items() if name not in _APART}

    def step_samples(self, work, contender):
        return self.samples("steps", work=work, contender=contender)

    def alone_seconds(self, work, contender):
        """Returns the median time of a step without communication. It is Tessera's own step for Tessera's contenders,
        and PyTorch's step for the others (DeepSpeed and Python run on PyTorch). Returns None if that step was not run,
        or if the contender is that step itself."""
        if self.is_alone(contender):
            return None
        family = self.contenders[contender]["family"]
        samples = self.step_samples(work, "tessera_alone" if family == "tessera" else "torch_alone")
        return stats.median(samples) if samples else None

    def tokens_per_s(self, entry, median_s):
        work = self.works[entry["work"]]
        return work["batch"] * work["model"]["seq_len"] * entry.get("ranks", self.ranks) / median_s

    def bench_cases(self, section, **key):
        """Returns the cases of `tessera bench SECTION` with these fields."""
        cases = self.data["tessera_bench"].get(section, {}).get("cases", [])
        return [case for case in cases if all(case[name] == value for name, value in key.items())]

    def bench_collectives(self, **key):
        """Returns the cases of `tessera bench collectives` that the peers have too. These cases move bytes, or sum
        fp32."""
        return [case for case in self.bench_cases("collectives", **key) if case["dtype"] not in ("bf16", "fp16")]


def _flat(rounds):
    return [sample for samples in rounds for sample in samples]


def _a_parameter(entry, what="rounds_s"):
    """Returns the samples of an entry divided by its "numel", so that entries with different numbers of parameters can
    be compared."""
    return [sample / entry["numel"] for sample in _flat(entry.get(what, []))]


def steps(results):
    rows = []
    for entry in results.data["steps"]:
        if entry["work"] not in results.compared:
            continue
        of = times(_flat(entry["rounds_s"]))
        alone = results.alone_seconds(entry["work"], entry["contender"])
        cost = {} if alone is None else stats.communication(of[1], alone)
        rows.append([entry["work"], results.label(entry["contender"]), *of, results.tokens_per_s(entry, of[1]),
                     cost.get("exposed_s"), cost.get("fraction"), cost.get("gustafson")])
    return {"title": "Step times", "columns": ["work", "contender", *TIMES, "tokens_per_s", "exposed_s", "communication_fraction",
                                               "gustafson_efficiency"], "rows": rows}


def _above_baseline(entry):
    return entry["peak_bytes"] - entry["baseline_bytes"]


def memory(results):
    rows = []
    for entry in results.entries("memory"):
        if entry["work"] not in results.compared:
            continue
        work = results.works[entry["work"]]
        formula = formula_bytes(results.contenders[entry["contender"]]["stage"], work["parameters"], results.ranks, work["dtype"])
        measured = _above_baseline(entry)
        rows.append([entry["work"], results.label(entry["contender"]), measured, formula, measured / formula,
                     entry.get("planned_bytes"), entry["baseline_bytes"]])
    return {"title": "Peak memory of a rank", "columns": ["work", "contender", "measured_bytes", "formula_bytes", "measured_over_formula",
                                                          "planned_bytes", "baseline_bytes"], "rows": rows}


def python(results):
    """Returns the table of one Python model under all contenders. "exposed" is the time of a step minus the time of
    PyTorch's step without communication."""
    rows = []
    for entry in results.entries("steps", work="python"):
        of = times(_flat(entry["rounds_s"]))
        alone = results.alone_seconds("python", entry["contender"])
        used = results.entry("memory", work="python", contender=entry["contender"])
        rows.append([results.label(entry["contender"]), *of, results.tokens_per_s(entry, of[1]),
                     None if alone is None else of[1] - alone, _above_baseline(used) if used else None,
                     used["baseline_bytes"] if used else None])
    return {"title": "One Python model", "columns": ["contender", *TIMES, "tokens_per_s", "exposed_s", "measured_bytes",
                                                     "baseline_bytes"], "rows": rows}


def crowded(results):
    """Makes the table of runs with more ranks than cores, by contender, beginning with the fewest ranks."""
    order, rows, fewest = list(results.contenders), [], {}
    for entry in sorted(results.entries("steps", work="crowded"),
                        key=lambda entry: (order.index(entry["contender"]), entry["ranks"])):
        of = times(_flat(entry["rounds_s"]))
        rate = results.tokens_per_s(entry, of[1])
        fewest.setdefault(entry["contender"], rate)
        rows.append([results.label(entry["contender"]), entry["ranks"], *of, rate, rate / fewest[entry["contender"]]])
    return {"title": "More ranks than cores", "columns": ["contender", "ranks", *TIMES, "tokens_per_s", "over_fewest_ranks"], "rows": rows}


def _optimizer_table(title, cases):
    """Makes a table. `cases`: (contender, parameters, samples, seconds of the limit or None)."""
    rows = []
    for contender, numel, samples, limit_s in cases:
        of = times(samples)
        rows.append([contender, numel, *of, numel / of[1], limit_s / of[1] if limit_s else None])
    return {"title": title, "columns": ["contender", "parameters", *TIMES, "parameters_per_s", "share_of_limit"], "rows": rows}


def optimizer(results):
    peers = [(entry["contender"], entry["numel"], _flat(entry["rounds_s"]), None) for entry in results.entries("optimizer")]
    ours = [(f"tessera {case['name']}", case["numel"], case["samples_s"], case["limit_s"]) for case in results.bench_cases("optimizer")]
    return _optimizer_table("Optimizer step, one thread", peers + ours)


def optimizer_avx2(results):
    return _optimizer_table("Optimizer step, one thread, AVX2", [
        (entry["contender"], entry["numel"], _flat(entry["rounds_s"]),
         stats.median(_flat(entry["limit_rounds_s"])) if "limit_rounds_s" in entry else None)
        for entry in results.entries("optimizer_avx2")])


def collectives(results):
    rows = []

    def add(contender, case, memory_kind, dtype, samples, of_limit):
        of = times(samples)
        rows.append([contender, case["collective"], memory_kind, dtype, case["bytes"], *of, case["bytes"] / of[1], of_limit])

    for entry in results.entries("collectives"):
        samples = _flat(entry["rounds_s"])
        limit = results.samples("collectives", contender="limit", collective=entry["collective"], bytes=entry["bytes"])
        add(entry["contender"], entry, "private", "fp32", samples, ratio(limit, samples) if entry["contender"] != "limit" else None)
    for case in results.bench_cases("collectives"):
        add("tessera", case, case["memory"], case["dtype"], case["samples_s"],
            case["limit_s"] / stats.median(case["samples_s"]) if case["limit_s"] else None)
    return {"title": "Collectives", "columns": ["contender", "collective", "memory", "dtype", "bytes", *TIMES, "bytes_per_s",
                                                "share_of_limit"], "rows": rows}


def disk(results):
    rows = []
    for entry in results.entries("disk"):
        of, cpu = times(_flat(entry["rounds_s"])), stats.median(_flat(entry["rounds_cpu_s"]))
        moved = entry["bytes"] * (2 if entry["kind"] == "mixed" else 1)
        rows.append([entry["contender"], entry["kind"], entry["bytes"], entry["settings"], *of, moved / of[1], cpu / (moved / 2**30)])
    return {"title": "Passes over a disk", "columns": ["contender", "pass", "bytes", "settings", *TIMES, "bytes_per_s", "cpu_s_per_gib"],
            "rows": rows}


def disk_steps(results):
    rows = []
    for entry in results.entries("disk_steps"):
        samples = _flat(entry["rounds_s"])
        of = times(samples)
        rows.append([entry["contender"], entry["numel"], entry["bytes"], *of, entry["numel"] / of[1],
                     ratio(_flat(entry.get("rounds_limit_s", [])), samples), entry.get("memory_bytes")])
    return {"title": "Optimizer step with its state on disk", "columns": ["contender", "parameters", "bytes", *TIMES, "parameters_per_s",
                                                                          "share_of_limit", "memory_bytes"], "rows": rows}


def bucket_studies(results):
    """Returns three facts for each model of `tessera bench buckets`. They are the best bucket, its gain over one
    collective for each tensor (in steps, and in communication only), and the alpha-beta fit of single reductions."""
    studies = []
    for model in results.data["tessera_bench"].get("buckets", {}).get("models", []):
        points = [(entry["bytes"], stats.median(entry["samples_s"])) for entry in model["reductions"]]
        alpha, beta = stats.alpha_beta_fit(points)
        per_tensor = {"bucket_bytes": None, "collectives": model["per_tensor_collectives"],
                      "samples_s": model["per_tensor_samples_s"],
                      "communication_s": model["per_tensor_communication_s"]}
        every = [per_tensor, *({} | entry for entry in model["sweep"])]
        for entry in every:
            for gain, samples in (("gain", "samples_s"), ("communication_gain", "communication_s")):
                entry[gain] = stats.ratio_by_turns(per_tensor[samples], entry[samples], model["steps_a_round"])
        best = max(every[1:], key=lambda entry: entry["gain"])
        studies.append({"model": model["model"], "data": model["data"], "best": best,
                        "communication_share": ratio(per_tensor["communication_s"], per_tensor["samples_s"]),
                        "alpha_s": alpha, "beta_s_per_byte": beta, "gradient_bytes": model["gradient_bytes"],
                        "points": points, "all": every, "inference": model["inference"]})
    return studies


_QUANTILES = (50, 95, 99)
_QUANTILE_COLUMNS = ["samples", *(f"p{percent}_s" for percent in _QUANTILES)]


def _quantiles(samples):
    return [len(samples), *(stats.percentile(samples, percent) for percent in _QUANTILES)]


def buckets(results):
    """Makes one row for each model and bucket. The row without bucket_bytes has one collective for each tensor."""
    rows = [[study["model"], entry["bucket_bytes"], entry["collectives"], *_quantiles(entry["samples_s"]),
             stats.median(entry["communication_s"]),
             study["alpha_s"] * entry["collectives"] + study["beta_s_per_byte"] * study["gradient_bytes"],
             entry["gain"], entry["communication_gain"]]
            for study in bucket_studies(results) for entry in study["all"]]
    return {"title": "Buckets", "columns": ["model", "bucket_bytes", "collectives", *_QUANTILE_COLUMNS, "communication_s",
                                            "communication_by_fit_s", "gain_over_per_tensor", "communication_gain"], "rows": rows}


def inference(results):
    rows = [[study["model"], of["loss"], of["accuracy"], *_quantiles(of["samples_s"])]
            for study in bucket_studies(results) for of in [study["inference"]]]
    return {"title": "Inference with the trained models", "columns": ["model", "loss", "accuracy", *_QUANTILE_COLUMNS], "rows": rows}


def of_bench(results, section):
    """Returns a table that `tessera bench` makes itself: step, memory, overhead."""
    data = results.data["tessera_bench"].get(section, {"columns": [], "rows": []})
    return {"title": f"tessera bench {section}", "columns": data["columns"], "rows": data["rows"]}


def _training_ratios(results):
    def samples(work, contender, _):
        return results.step_samples(work, contender)

    def used(work, contender, ours):
        entry = results.entry("memory", work=work, contender=ours if contender == "plan" else contender)
        return entry and [entry["planned_bytes"] if contender == "plan" else _above_baseline(entry)]

    for works, step, peak in ((results.compared, "step", "peak_memory"), (["python"], "python_step", "python_memory")):
        for measure, all_targets, found in ((step, targets.STEPS["host"], samples), (peak, targets.MEMORY, used)):
            for work in works:
                for of_work, peer, ours, target in all_targets:
                    if of_work == work or of_work is None and work in results.compared:
                        yield [measure, None if work == "python" else work, None, results.label(peer), results.label(ours), target,
                               ratio(*(found(work, contender, ours) for contender in (peer, ours)))]


def _optimizer_ratios(results):
    for peer, kernel, target in targets.OPTIMIZER["host"]:
        for case in results.bench_cases("optimizer", name=kernel):
            theirs = [sample for entry in results.entries("optimizer", contender=peer) for sample in _a_parameter(entry)]
            if peer == "limit":
                theirs = [case["limit_s"] / case["numel"]] if case["limit_s"] else []
            ours = [sample / case["numel"] for sample in case["samples_s"]]
            yield ["optimizer", None, None, peer, f"tessera {kernel}", target, ratio(theirs, ours)]


def _avx2_ratios(results):
    for peer, ours, target in targets.OPTIMIZER_AVX2:
        samples = [[sample for entry in results.entries("optimizer_avx2", contender=contender) for sample in _a_parameter(entry)]
                   for contender in (peer, ours)]
        yield ["optimizer_avx2", None, None, peer, ours, target, ratio(*samples)]


def _collective_ratios(results):
    for collective, size, target in targets.COLLECTIVES:
        memory_kind = "group" if size is None else "private"
        gloo = {entry["bytes"]: _flat(entry["rounds_s"])
                for entry in results.entries("collectives", contender="gloo", collective=collective)}
        ours = {case["bytes"]: case["samples_s"]
                for case in results.bench_collectives(collective=collective, memory=memory_kind)}
        chosen = max(gloo.keys() & ours.keys(), default=None) if size is None else size
        yield ["collective", collective, chosen, "gloo", _MEMORY_KINDS[memory_kind], target,
               ratio(gloo.get(chosen), ours.get(chosen))]


def _limit_ratios(results):
    for collective in [collective for collective, size, _ in targets.COLLECTIVES if size is None]:
        for memory_kind, target in targets.COLLECTIVES_OF_LIMIT:
            cases = [case for case in results.bench_collectives(collective=collective, memory=memory_kind) if case["limit_s"]]
            if cases:
                largest = max(cases, key=lambda case: case["bytes"])
                yield ["collective", collective, largest["bytes"], "limit", _MEMORY_KINDS[memory_kind], target,
                       ratio([largest["limit_s"]], largest["samples_s"])]


def _crowded_ratios(results):
    peer, ours = "torch_fsdp2", "tessera_full_shard"
    rows = [row for row in crowded(results)["rows"] if row[0] == results.label(ours)]
    for who, ranks, *_, over_fewest in rows[1:]:
        yield ["crowded_work", f"{ranks} ranks", None, f"{who}, {rows[0][1]} ranks", who, targets.CROWDED, over_fewest]
    for _, ranks, *_ in rows:
        samples = [results.samples("steps", work="crowded", contender=contender, ranks=ranks) for contender in (peer, ours)]
        yield ["crowded_step", f"{ranks} ranks", None, results.label(peer), results.label(ours), None, ratio(*samples)]


def _disk_ratios(results):
    def passes(contender, kind, what="rounds_s"):
        return results.samples("disk", what, contender=contender, kind=kind)
    sizes = {entry["kind"]: entry["bytes"] for entry in results.entries("disk")}
    for kind, size in sizes.items():
        ours = passes("tessera", kind)
        peers = {name: passes(name, kind) for name in ("fio", "deepspeed_aio_best") if passes(name, kind)}
        if peers:
            best = min(peers, key=lambda name: stats.median(peers[name]))
            yield ["disk", kind, size, best, "tessera", targets.DISK, ratio(peers[best], ours)]
        defaults = passes("deepspeed_aio", kind)
        if defaults:
            slow = "fio" in peers and stats.median(peers["fio"]) < targets.DISK_SLOW * stats.median(defaults)
            yield ["disk", kind, size, "deepspeed_aio", "tessera", targets.DISK_DEFAULTS if slow else None, ratio(defaults, ours)]
            yield ["disk_cpu", kind, size, "deepspeed_aio", "tessera", targets.DISK_CPU,
                   ratio(passes("deepspeed_aio", kind, "rounds_cpu_s"), passes("tessera", kind, "rounds_cpu_s"))]
    steps_on_disk = results.entries("disk_steps")
    for entry in (entry for entry in steps_on_disk if entry["contender"].startswith("tessera ")):
        ours = _a_parameter(entry)
        kernel = entry["contender"].removeprefix("tessera ").removesuffix(" cached")
        for peer in results.entries("disk_steps", contender="deepspeed_swapper"):
            yield ["disk_step", None, None, peer["contender"], entry["contender"], targets.DISK_STEPS.get(kernel),
                   ratio(_a_parameter(peer), ours)]
        yield ["disk_step", None, None, "disk_limit", entry["contender"], targets.DISK_STEPS_OF_LIMIT,
               ratio(_a_parameter(entry, "rounds_limit_s"), ours)]


def _bucket_ratios(results):
    for study in bucket_studies(results):
        for measure, gain in (("buckets", "gain"), ("buckets_communication", "communication_gain")):
            yield [measure, study["model"], study["best"]["bucket_bytes"], "per_tensor", "best bucket", targets.BUCKETS,
                   study["best"][gain]]


def ratios(results):
    """Returns the table of the measured ratios: the peer's median divided by Tessera's. Only "crowded_work" is the
    ratio of two throughputs of Tessera. `subject` is the workload, the collective, the model or the number of ranks.
    `bytes` is the size of a collective, or of the best bucket."""
    sources = (_training_ratios, _optimizer_ratios, _avx2_ratios, _collective_ratios, _limit_ratios, _crowded_ratios, _disk_ratios,
               _bucket_ratios)
    rows = [[*row, reached(row[-1], row[-2])] for source in sources for row in source(results) if row[-1] is not None]
    return {"title": "Ratios", "columns": ["measure", "subject", "bytes", "peer", "tessera", "target", "measured_ratio", "reached"],
            "rows": rows}


def all_tables(results):
    """Returns {file stem: table}."""
    makers = (steps, ratios, memory, python, optimizer, optimizer_avx2, collectives, crowded, disk, disk_steps, buckets, inference)
    return {make.__name__: make(results) for make in makers} | {
        f"tessera_{section}": of_bench(results, section) for section in ("step", "memory", "overhead")}
