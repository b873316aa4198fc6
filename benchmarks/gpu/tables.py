"""A GPU run's results as tables of numbers. Standard library only.

A table is {"title", "columns", "rows"}: a row holds text, numbers, and None for what does not apply. Every number is
computed here, from samples; a row without samples ends in why it has none.
"""

import stats
from gpu import targets
from gpu.schedule import last_line

TORCH_OPTIMIZERS = ("fused_fp32", "fused_bf16", "chain_bf16")
TESSERA_OPTIMIZERS = ("fp32", "mixed", "mixed_bf16_moments", "mixed_8bit_moments")
LIMITS = {"copy": "copy on the device, read and written", "gemm": "bf16 matrix product, 8192 x 8192 x 8192",
          "h2d": "pinned host memory to the device", "d2h": "the device to pinned host memory"}
_RATES = {"B": (1e9, "GB/s"), "FLOP": (1e12, "TFLOP/s")}
_LONGEST_REASON = 120


class Results:
    """The results (run_gpu describes them), with the look-ups that tables share."""

    def __init__(self, data):
        self.data = data
        self.works = {work["name"]: work for work in data["works"]}
        self.labels = {contender["name"]: contender["label"] for contender in data["contenders"]}

    def entry(self, section, **key):
        """None if there is none."""
        for entry in self.data[section]:
            if all(entry[name] == value for name, value in key.items()):
                return entry
        return None

    def samples(self, section, **key):
        """Of all rounds; none if there is no such entry."""
        entry = self.entry(section, **key)
        return [sample for samples in entry["rounds_s"] for sample in samples] if entry else []

    def rate(self, limit):
        """Of the limit's median, in its unit a second; None if it was not measured."""
        samples = self.samples("limits", limit=limit)
        return self.entry("limits", limit=limit)["amount"] / stats.median(samples) if samples else None

    def reason(self, key):
        """Why the task `key` gave nothing."""
        for section, verb in (("failed", "failed"), ("not_run", "not run")):
            for entry in self.data[section]:
                if entry["key"] == key:
                    return f"{verb}: {last_line(entry['why'])[:_LONGEST_REASON]}"
        return "not run: it was not asked for"


def _times_ms(samples):
    of = stats.summary(samples)
    return [of["n"], 1e3 * of["median"], 1e3 * of["p10"], 1e3 * of["p90"]]


_TIMES = ["samples", "median, ms", "p10, ms", "p90, ms"]


def limits(results):
    rows = []
    for name, label in LIMITS.items():
        samples = results.samples("limits", limit=name)
        if not samples:
            rows.append([label, *[None] * 6, results.reason("limits")])
            continue
        scale, unit = _RATES[results.entry("limits", limit=name)["unit"]]
        rows.append([label, *_times_ms(samples), results.rate(name) / scale, unit, ""])
    return {"title": "Limits", "columns": ["limit", *_TIMES, "rate", "unit", "note"], "rows": rows}


def optimizer(results):
    """The share of the limit: of the bytes at the rate of the copy in Limits; for Tessera at that of a copy which its
    bench times between the steps."""
    copy = results.rate("copy")
    rows = []
    for name in TORCH_OPTIMIZERS + TESSERA_OPTIMIZERS:
        tessera = name in TESSERA_OPTIMIZERS
        label = f"Tessera {name}" if tessera else f"PyTorch {name}"
        samples = results.samples("optimizer", contender=name)
        if not samples:
            key = "optimizer/tessera" if tessera else f"optimizer/{name}"
            rows.append([label, *[None] * 7, results.reason(key)])
            continue
        entry, median = results.entry("optimizer", contender=name), stats.median(samples)
        if tessera:
            share = stats.median(entry["limits_s"]) / median
        else:
            share = entry["bytes"] / copy / median if copy else None
        rows.append([label, entry["numel"], *_times_ms(samples), entry["bytes"] / median / 1e9, share, ""])
    return {"title": "Optimizer step",
            "columns": ["contender", "parameters", *_TIMES, "GB/s", "of the copy limit", "note"], "rows": rows}


def steps(results, work):
    """model FLOP/s: works.flops_per_token times tokens a second; its share is of the product in Limits."""
    gemm = results.rate("gemm")
    plain = results.samples("steps", work=work["name"], contender="torch_eager")
    rows = []
    for name in work["contenders"]:
        samples = results.samples("steps", work=work["name"], contender=name)
        if not samples:
            rows.append([results.labels[name], *[None] * 10, results.reason(f"steps/{work['name']}/{name}")])
            continue
        entry, median = results.entry("steps", work=work["name"], contender=name), stats.median(samples)
        rate = work["tokens"] / median
        rows.append([results.labels[name], *_times_ms(samples), rate,
                     stats.median(plain) / median if plain else None,
                     work["flops_per_token"] * rate / gemm if gemm else None,
                     1e3 * stats.median(entry["exposed_s"]) if entry.get("exposed_s") else None,
                     _gibibytes(entry["device_bytes"]),
                     _gibibytes(entry.get("allocated_peak_bytes") or entry.get("allocated_bytes")), ""])
    columns = ["contender", *_TIMES, "tokens/s", "times as fast as PyTorch's plain module",
               "model FLOP/s of the matrix product's", "exposed communication, ms", "GPU memory, GiB", "of it tensors, GiB", "note"]
    return {"title": work["title"], "columns": columns, "rows": rows}


def launches(results):
    """Steps in which the GPU waits for the host. over the plain module: a step's difference, for each unit."""
    rows = []
    for entry in results.data["launches"]:
        samples = results.samples("launches", contender=entry["contender"])
        over = entry["over_plain_unit_s"]
        rows.append([entry["contender"], len(samples), 1e3 * stats.median(samples),
                     1e6 * stats.median(over) if over else None])
    return {"title": "What a unit costs the host", "columns": ["contender", "rounds", "step, ms",
                                                                "over the plain module, us a unit"], "rows": rows}


def _gibibytes(count):
    return None if count is None else count / 2**30


def ratios(results):
    rows = [*_optimizer_ratios(results), *_step_ratios(results), *_launch_ratios(results)]
    return {"title": "Targets", "columns": ["what", "peer", "Tessera", "target", "measured", "reached", "note"],
            "rows": rows}


def _ratio_row(what, peer, ours, target, theirs_s, ours_s, reason):
    """`reason()`: why one of the two has no samples."""
    if not theirs_s or not ours_s:
        return [what, peer, ours, target, None, None, reason()]
    ratio = stats.median(theirs_s) / stats.median(ours_s)
    return [what, peer, ours, target, ratio, None if target is None else "yes" if ratio >= target else "no", ""]


def _optimizer_ratios(results):
    for peer, kernel, target in targets.OPTIMIZER:
        ours, entry = results.samples("optimizer", contender=kernel), results.entry("optimizer", contender=kernel)
        if peer == "limit":
            theirs, label = entry["limits_s"] if entry else [], "limit"
        else:
            theirs, label = results.samples("optimizer", contender=peer), f"PyTorch {peer}"
        keys = (("optimizer/tessera", ours), (f"optimizer/{peer}", theirs))
        yield _ratio_row("optimizer", label, kernel, target, theirs, ours, lambda: _first_reason(results, keys))


def _step_ratios(results):
    for work in results.data["works"]:
        for of_work, peer, ours, target in targets.STEPS:
            if of_work not in (None, work["name"]) or not {peer, ours} <= set(work["contenders"]):
                continue
            their_s, our_s = (results.samples("steps", work=work["name"], contender=name) for name in (peer, ours))
            keys = ((f"steps/{work['name']}/{ours}", our_s), (f"steps/{work['name']}/{peer}", their_s))
            yield _ratio_row(f"step, {work['title']}", results.labels[peer], results.labels[ours], target, their_s,
                             our_s, lambda: _first_reason(results, keys))


def _launch_ratios(results):
    """20 us over what a unit costs: at least 1 where the target is reached."""
    for row in launches(results)["rows"]:
        if row[3] is not None:
            ratio = targets.UNIT_US / row[3] if row[3] > 0 else None
            yield [f"host time of a unit: {targets.UNIT_US} us over it", "plain module", row[0], 1.0, ratio,
                   "no" if row[3] > targets.UNIT_US else "yes", f"{row[3]:.1f} us"]


def _first_reason(results, keys):
    return next(results.reason(key) for key, samples in keys if not samples)


def gpu_tests(results):
    rows = [[test["name"], test["status"], test["seconds"]] for test in results.data["tests"]]
    return {"title": "Tests with label gpu", "columns": ["test", "status", "seconds"], "rows": rows}
