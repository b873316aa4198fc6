"""results.json as tables of numbers: what the CSV files hold and the page shows. Standard library only.

A table is {"title", "columns", "rows"}: a row holds text, numbers, and None for what was not measured. Units are in the
columns' names. Every number is computed here, from samples.
"""

import stats
import targets
from memory import formula_bytes


_MEMORY_KINDS = {"private": "Tessera, private memory", "group": "Tessera, the group's memory"}


def _flat(rounds):
    return [sample for samples in rounds for sample in samples]


def _a_parameter(entry, what="rounds_s"):
    """The samples of an entry with "numel", so that the numbers of parameters need not be the same."""
    return [sample / entry["numel"] for sample in _flat(entry[what])]


class Results:
    """results.json, with the look-ups that the tables share."""

    def __init__(self, data):
        self.data = data
        self.ranks = data["ranks"]
        self.works = {work["name"]: work for work in data["works"]}
        self.contenders = {contender["name"]: contender for contender in data["contenders"]}
        self.contenders |= {entry["contender"]: entry for entry in data.get("python", [])
                            if entry["contender"] not in self.contenders}

    def samples(self, section, what="rounds_s", **key):
        """All samples of the entry with these fields; an empty list if there is none, or no such section yet."""
        for entry in self.data.get(section, []):
            if all(entry.get(name) == value for name, value in key.items()):
                return _flat(entry[what])
        return []

    def step_samples(self, work, contender):
        return self.samples("steps", work=work, contender=contender)

    def alone_seconds(self, work, family):
        """Median step without communication: Tessera's own for Tessera, PyTorch's for the others (DeepSpeed runs on
        it). None if it was not run."""
        samples = self.step_samples(work, "tessera_alone" if family == "tessera" else "torch_alone")
        return stats.median(samples) if samples else None

    def memory(self, work, contender):
        for entry in self.data["memory"]:
            if entry["work"] == work and entry["contender"] == contender:
                return entry
        return None

    def bench_collectives(self, **key):
        """Cases of `tessera bench collectives` with these fields that move bytes or sum fp32, as the peers' do."""
        return [case for case in self.bench_cases("collectives", **key) if case["dtype"] not in ("bf16", "fp16")]

    def bench_cases(self, section, **key):
        """Cases of `tessera bench SECTION` with these fields."""
        cases = self.data["tessera_bench"].get(section, {}).get("cases", [])
        return [case for case in cases if all(case[name] == value for name, value in key.items())]


def steps(results):
    columns = ["work", "contender", "samples", "median_s", "p10_s", "p90_s", "tokens_per_s", "exposed_s",
               "communication_fraction", "gustafson_efficiency"]
    rows = []
    for entry in results.data["steps"]:
        contender, work = results.contenders[entry["contender"]], results.works[entry["work"]]
        of = stats.summary(results.step_samples(entry["work"], entry["contender"]))
        alone = results.alone_seconds(entry["work"], contender["family"])
        cost = {} if contender["alone"] or alone is None else stats.communication(of["median"], alone)
        tokens = work["model"]["seq_len"] * results.ranks
        rows.append([entry["work"], contender["label"], of["n"], of["median"], of["p10"], of["p90"],
                     tokens / of["median"], cost.get("exposed_s"), cost.get("fraction"), cost.get("gustafson")])
    return {"title": "Step times", "columns": columns, "rows": rows}


def _ratio(theirs, ours):
    return stats.median(theirs) / stats.median(ours) if theirs and ours else None


def _judged(rows):
    """Adds "yes", "no" or None to rows that end in (target, measured); leaves out what was not measured."""
    return [row + [None if row[-2] is None else ("yes" if row[-1] >= row[-2] else "no")]
            for row in rows if row[-1] is not None]


def _step_ratios(results):
    for work in results.works:
        for of_work, peer, ours, target in targets.STEPS:
            if of_work not in (None, work):
                continue
            ratio = _ratio(results.step_samples(work, peer), results.step_samples(work, ours))
            yield ["step", work, None, label(results, peer), label(results, ours), target, ratio]


def _memory_ratios(results):
    for work in results.works:
        for peer, ours, target in targets.MEMORY:
            mine = results.memory(work, ours)
            theirs = mine if peer == "plan" else results.memory(work, peer)
            ratio = None
            if theirs and mine:
                bytes_of_peer = mine["planned_bytes"] if peer == "plan" else _above_baseline(theirs)
                ratio = bytes_of_peer / _above_baseline(mine)
            yield ["peak_memory", work, None, label(results, peer), label(results, ours), target, ratio]


def _python_ratios(results):
    entries = {entry["contender"]: entry for entry in results.data.get("python", [])}
    for peer, ours, target in targets.PYTHON:
        yield ["python_step", None, None, label(results, peer), label(results, ours), target,
               _ratio(*(results.samples("python", contender=name) for name in (peer, ours)))]
    for peer, ours, target in targets.PYTHON_MEMORY:
        theirs, mine = (_above_baseline(entries[name]) if "peak_bytes" in entries.get(name, {}) else None
                        for name in (peer, ours))
        yield ["python_memory", None, None, label(results, peer), label(results, ours), target,
               theirs / mine if theirs and mine else None]


def _optimizer_ratios(results):
    for peer, kernel, target in targets.OPTIMIZER:
        for case in results.bench_cases("optimizer", name=kernel):
            ours = [sample / case["numel"] for sample in case["samples_s"]]
            if peer == "limit":
                theirs = [case["limit_s"] / case["numel"]] if case["limit_s"] else []
            else:
                theirs = [sample for entry in results.data["optimizer"] if entry["contender"] == peer
                          for sample in _a_parameter(entry)]
            yield ["optimizer", None, None, peer, f"tessera {kernel}", target, _ratio(theirs, ours)]


def _avx2_ratios(results):
    def of(contender):
        return [sample for entry in results.data.get("optimizer_avx2", []) if entry["contender"] == contender
                for sample in _a_parameter(entry)]
    for peer, ours, target in targets.OPTIMIZER_AVX2:
        if of(peer) and of(ours):
            yield ["optimizer_avx2", None, None, peer, ours, target, _ratio(of(peer), of(ours))]


def _collective_ratios(results):
    for collective, size, target in targets.COLLECTIVES:
        memory_kind = "group" if size is None else "private"
        gloo = {entry["bytes"] for entry in results.data["collectives"]
                if entry["contender"] == "gloo" and entry["collective"] == collective}
        ours = {case["bytes"]: case["samples_s"]
                for case in results.bench_collectives(collective=collective, memory=memory_kind)}
        common = gloo & set(ours)
        if not common:
            continue
        chosen = max(common) if size is None else size
        ratio = None
        if chosen in common:
            theirs = results.samples("collectives", contender="gloo", collective=collective, bytes=chosen)
            ratio = _ratio(theirs, ours[chosen])
        yield ["collective", collective, chosen, "gloo", _MEMORY_KINDS[memory_kind], target, ratio]


def _limit_ratios(results):
    for collective in [collective for collective, size, _ in targets.COLLECTIVES if size is None]:
        for memory_kind, target in targets.COLLECTIVES_OF_LIMIT:
            cases = [case for case in results.bench_collectives(collective=collective, memory=memory_kind) if case["limit_s"]]
            if cases:
                largest = max(cases, key=lambda case: case["bytes"])
                yield ["collective", collective, largest["bytes"], "limit", _MEMORY_KINDS[memory_kind], target,
                       largest["limit_s"] / stats.median(largest["samples_s"])]


def _crowded_ratios(results):
    rows = [row for row in crowded(results)["rows"] if row[0] == label(results, "tessera_full_shard")]
    for who, ranks, *_, over_fewest in rows[1:]:
        yield ["crowded_work", f"{ranks} ranks", None, f"{who}, {rows[0][1]} ranks", who, targets.CROWDED, over_fewest]
    for _, ranks, *_ in rows:
        yield ["crowded_step", f"{ranks} ranks", None, label(results, "torch_fsdp2"),
               label(results, "tessera_full_shard"), None,
               _ratio(*(results.samples("crowded", contender=contender, ranks=ranks)
                        for contender in ("torch_fsdp2", "tessera_full_shard")))]


def _disk_ratios(results):
    def passes(contender, kind, what="rounds_s"):
        return results.samples("disk", what, contender=contender, kind=kind)
    sizes = {entry["kind"]: entry["bytes"] for entry in results.data.get("disk", [])}
    for kind, size in sizes.items():
        ours = passes("tessera", kind)
        peers = {name: passes(name, kind) for name in ("fio", "deepspeed_aio_best")}
        peers = {name: samples for name, samples in peers.items() if samples}
        if peers:
            best = min(peers, key=lambda name: stats.median(peers[name]))
            yield ["disk", kind, size, best, "tessera", targets.DISK, _ratio(peers[best], ours)]
        defaults = passes("deepspeed_aio", kind)
        if defaults:
            slow = "fio" in peers and stats.median(peers["fio"]) < targets.DISK_SLOW * stats.median(defaults)
            yield ["disk", kind, size, "deepspeed_aio", "tessera", targets.DISK_DEFAULTS if slow else None,
                   _ratio(defaults, ours)]
            yield ["disk_cpu", kind, size, "deepspeed_aio", "tessera", targets.DISK_CPU,
                   _ratio(passes("deepspeed_aio", kind, "rounds_cpu_s"), passes("tessera", kind, "rounds_cpu_s"))]
    steps = results.data.get("disk_steps", [])
    swapper = [entry for entry in steps if entry["contender"] == "deepspeed_swapper"]
    for entry in (entry for entry in steps if entry["contender"].startswith("tessera ")):
        ours = _a_parameter(entry)
        kernel = entry["contender"].removeprefix("tessera ").removesuffix(" cached")
        target = dict(targets.DISK_STEPS).get(kernel)
        for peer in swapper:
            yield ["disk_step", None, None, peer["contender"], entry["contender"], target,
                   _ratio(_a_parameter(peer), ours)]
        yield ["disk_step", None, None, "disk_limit", entry["contender"], targets.DISK_STEPS_OF_LIMIT,
               _ratio(_a_parameter(entry, "rounds_limit_s"), ours)]


def _bucket_ratios(results):
    for study in bucket_studies(results):
        for measure, gain in (("buckets", "gain"), ("buckets_communication", "communication_gain")):
            yield [measure, study["model"], study["best_bytes"], "per_tensor", "best bucket", targets.BUCKETS,
                   study[gain]]


def ratios(results):
    """The peer's median over Tessera's, by measure. `subject` is the work, collective, model or number of ranks;
    `bytes` is the size of a collective, or of the best bucket."""
    rows = [row for source in (_step_ratios, _memory_ratios, _python_ratios, _optimizer_ratios, _avx2_ratios, _collective_ratios,
                               _limit_ratios, _crowded_ratios, _disk_ratios, _bucket_ratios)
            for row in source(results)]
    columns = ["measure", "subject", "bytes", "peer", "tessera", "target", "measured_ratio", "reached"]
    return {"title": "Ratios", "columns": columns, "rows": _judged(rows)}


def label(results, contender):
    return results.contenders.get(contender, {}).get("label", contender)


def _above_baseline(entry):
    return entry["peak_bytes"] - entry["baseline_bytes"]


def memory(results):
    columns = ["work", "contender", "measured_bytes", "formula_bytes", "measured_over_formula", "planned_bytes",
               "baseline_bytes"]
    rows = []
    for entry in results.data["memory"]:
        contender, work = results.contenders[entry["contender"]], results.works[entry["work"]]
        formula = formula_bytes(contender["stage"], work["parameters"], results.ranks, work["dtype"])
        measured = _above_baseline(entry)
        rows.append([entry["work"], contender["label"], measured, formula, measured / formula,
                     entry.get("planned_bytes"), entry["baseline_bytes"]])
    return {"title": "Peak memory of a rank", "columns": columns, "rows": rows}


_OPTIMIZER_COLUMNS = ["contender", "parameters", "samples", "median_s", "p10_s", "p90_s", "parameters_per_s", "share_of_limit"]


def _optimizer_row(contender, numel, samples, limit_s=None):
    of = stats.summary(samples)
    return [contender, numel, of["n"], of["median"], of["p10"], of["p90"], numel / of["median"],
            limit_s / of["median"] if limit_s else None]


def optimizer(results):
    rows = [_optimizer_row(entry["contender"], entry["numel"], _flat(entry["rounds_s"])) for entry in results.data["optimizer"]]
    rows += [_optimizer_row(f"tessera {case['name']}", case["numel"], case["samples_s"], case["limit_s"])
             for case in results.bench_cases("optimizer")]
    return {"title": "Optimizer step, one thread", "columns": _OPTIMIZER_COLUMNS, "rows": rows}


def optimizer_avx2(results):
    rows = []
    for entry in results.data.get("optimizer_avx2", []):
        limits = _flat(entry.get("limit_rounds_s", []))
        rows.append(_optimizer_row(entry["contender"], entry["numel"], _flat(entry["rounds_s"]),
                                   stats.median(limits) if limits else None))
    return {"title": "Optimizer step, one thread, AVX2", "columns": _OPTIMIZER_COLUMNS, "rows": rows}


def collectives(results):
    columns = ["contender", "collective", "memory", "dtype", "bytes", "samples", "median_s", "p10_s", "p90_s",
               "bytes_per_s", "share_of_limit"]
    rows = []
    for entry in results.data["collectives"]:
        samples = results.samples("collectives", contender=entry["contender"], collective=entry["collective"],
                                  bytes=entry["bytes"])
        limit = results.samples("collectives", contender="limit", collective=entry["collective"], bytes=entry["bytes"])
        of_limit = _ratio(limit, samples) if entry["contender"] != "limit" else None
        rows.append(_collective_row(entry["contender"], entry, "private", "fp32", samples, of_limit))
    for case in results.bench_cases("collectives"):
        of_limit = case["limit_s"] / stats.median(case["samples_s"]) if case["limit_s"] else None
        rows.append(_collective_row("tessera", case, case["memory"], case["dtype"], case["samples_s"], of_limit))
    return {"title": "Collectives", "columns": columns, "rows": rows}


def python(results):
    """One Python model under everybody; exposed is what a step takes beyond PyTorch's without communication."""
    columns = ["contender", "samples", "median_s", "p10_s", "p90_s", "tokens_per_s", "exposed_s", "measured_bytes",
               "baseline_bytes"]
    alone = results.samples("python", contender="torch_alone")
    rows = []
    for entry in results.data.get("python", []):
        of = stats.summary(results.samples("python", contender=entry["contender"]))
        exposed = None if entry["alone"] or not alone else of["median"] - stats.median(alone)
        rows.append([entry["label"], of["n"], of["median"], of["p10"], of["p90"],
                     entry["tokens_a_rank"] * results.ranks / of["median"], exposed,
                     _above_baseline(entry) if "peak_bytes" in entry else None, entry.get("baseline_bytes")])
    return {"title": "One Python model", "columns": columns, "rows": rows}


def crowded(results):
    """Ranks that outnumber the cores; by contender, fewest ranks first."""
    columns = ["contender", "ranks", "samples", "median_s", "p10_s", "p90_s", "tokens_per_s", "over_fewest_ranks"]
    rows = []
    order = list(results.contenders)
    entries = sorted(results.data["crowded"], key=lambda entry: (order.index(entry["contender"]), entry["ranks"]))
    fewest = {}
    for entry in entries:
        of = stats.summary(results.samples("crowded", contender=entry["contender"], ranks=entry["ranks"]))
        rate = entry["ranks"] * entry["tokens_a_rank"] / of["median"]
        fewest.setdefault(entry["contender"], rate)
        rows.append([label(results, entry["contender"]), entry["ranks"], of["n"], of["median"], of["p10"], of["p90"],
                     rate, rate / fewest[entry["contender"]]])
    return {"title": "More ranks than cores", "columns": columns, "rows": rows}


def disk(results):
    columns = ["contender", "pass", "bytes", "settings", "samples", "median_s", "p10_s", "p90_s", "bytes_per_s",
               "cpu_s_per_gib"]
    rows = []
    for entry in results.data.get("disk", []):
        of, cpu = (stats.summary(_flat(entry[what])) for what in ("rounds_s", "rounds_cpu_s"))
        moved = entry["bytes"] * (2 if entry["kind"] == "mixed" else 1)
        rows.append([entry["contender"], entry["kind"], entry["bytes"], entry["settings"], of["n"], of["median"],
                     of["p10"], of["p90"], moved / of["median"], cpu["median"] / (moved / 2**30)])
    return {"title": "Passes over a disk", "columns": columns, "rows": rows}


def disk_steps(results):
    columns = ["contender", "parameters", "bytes", "samples", "median_s", "p10_s", "p90_s", "parameters_per_s",
               "share_of_limit", "memory_bytes"]
    rows = []
    for entry in results.data.get("disk_steps", []):
        samples, limit = _flat(entry["rounds_s"]), _flat(entry.get("rounds_limit_s", []))
        of = stats.summary(samples)
        rows.append([entry["contender"], entry["numel"], entry["bytes"], of["n"], of["median"], of["p10"], of["p90"],
                     entry["numel"] / of["median"], _ratio(limit, samples), entry.get("memory_bytes")])
    return {"title": "Optimizer step with its state on disk", "columns": columns, "rows": rows}


def _collective_row(contender, case, memory_kind, dtype, samples, of_limit):
    of = stats.summary(samples)
    return [contender, case["collective"], memory_kind, dtype, case["bytes"], of["n"], of["median"], of["p10"],
            of["p90"], case["bytes"] / of["median"], of_limit]


def bucket_studies(results):
    """For each model of `tessera bench buckets`: the best bucket, what it gains over one collective a tensor (in steps,
    and in communication alone), and the alpha-beta fit of single reductions."""
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
        studies.append({"model": model["model"], "data": model["data"], "best_bytes": best["bucket_bytes"],
                        "best_collectives": best["collectives"],
                        "per_tensor_s": stats.median(per_tensor["samples_s"]),
                        "gain": best["gain"], "communication_gain": best["communication_gain"],
                        "communication_share": _ratio(per_tensor["communication_s"], per_tensor["samples_s"]),
                        "alpha_s": alpha, "beta_s_per_byte": beta, "gradient_bytes": model["gradient_bytes"],
                        "points": points, "sweep": every[1:], "all": every,
                        "inference": model["inference"]})
    return studies


def buckets(results):
    """One row a model and bucket; the one without bucket_bytes has one collective a tensor."""
    columns = ["model", "bucket_bytes", "collectives", "samples", "p50_s", "p95_s", "p99_s", "communication_s",
               "communication_by_fit_s", "gain_over_per_tensor", "communication_gain"]
    rows = []
    for study in bucket_studies(results):
        for entry in study["all"]:
            quantiles = [stats.percentile(entry["samples_s"], percent) for percent in (50, 95, 99)]
            rows.append([study["model"], entry["bucket_bytes"], entry["collectives"], len(entry["samples_s"]),
                         *quantiles, stats.median(entry["communication_s"]),
                         study["alpha_s"] * entry["collectives"] + study["beta_s_per_byte"] * study["gradient_bytes"],
                         entry["gain"], entry["communication_gain"]])
    return {"title": "Buckets", "columns": columns, "rows": rows}


def inference(results):
    columns = ["model", "loss", "accuracy", "samples", "p50_s", "p95_s", "p99_s"]
    rows = []
    for study in bucket_studies(results):
        of = study["inference"]
        rows.append([study["model"], of["loss"], of["accuracy"], len(of["samples_s"]),
                     *(stats.percentile(of["samples_s"], percent) for percent in (50, 95, 99))])
    return {"title": "Inference with the trained models", "columns": columns, "rows": rows}


def of_bench(results, section):
    """The tables that `tessera bench` makes itself: step, memory, overhead."""
    data = results.data["tessera_bench"].get(section, {"columns": [], "rows": []})
    return {"title": f"tessera bench {section}", "columns": data["columns"], "rows": data["rows"]}


def all_tables(results):
    """{file stem: table} of those that have rows."""
    tables = {"steps": steps(results), "ratios": ratios(results), "memory": memory(results), "python": python(results),
              "optimizer": optimizer(results), "optimizer_avx2": optimizer_avx2(results), "collectives": collectives(results), "crowded": crowded(results),
              "disk": disk(results), "disk_steps": disk_steps(results),
              "buckets": buckets(results), "inference": inference(results)}
    tables |= {f"tessera_{section}": of_bench(results, section) for section in ("step", "memory", "overhead")}
    return {name: table for name, table in tables.items() if table["rows"]}
