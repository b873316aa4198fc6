"""Makes tables with the numbers of a GPU run's results. A row without samples says why it has none. It uses the
standard library only."""

import stats
import targets
from results import Results
from tables import ratio, reached, times
from works import flops_per_token

TORCH_OPTIMIZERS = ("fused_fp32", "fused_bf16", "chain_bf16")
TESSERA_OPTIMIZERS = ("fp32", "mixed", "mixed_bf16_moments", "mixed_8bit_moments")
LIMITS = {"copy": "copy on the device, read and written", "gemm": "bf16 matrix product, 8192 x 8192 x 8192",
          "h2d": "pinned host memory to the device", "d2h": "the device to pinned host memory"}
_RATES = {"B": (1e9, "GB/s"), "FLOP": (1e12, "TFLOP/s")}
_TIMES = ["samples", "median, ms", "p10, ms", "p90, ms"]


class GpuResults(Results):
    def rate(self, limit):
        """Returns the amount of a limit divided by the limit's median time. Returns None if the limit was not
        measured."""
        samples = self.samples("limits", limit=limit)
        return self.entry("limits", limit=limit)["amount"] / stats.median(samples) if samples else None


def _table(title, first, columns, rows):
    """Returns a table. `rows`: (cells before the times, samples, a function from the median to the cells after the
    times, the reason why there are no samples)."""
    cells = []
    for before, samples, behind, reason in rows:
        if samples:
            cells.append([*before, *times(samples, 1e3), *behind(stats.median(samples)), ""])
        else:
            cells.append([before[0], *[None] * (len(first) - 1 + len(_TIMES) + len(columns)), reason])
    return {"title": title, "columns": [*first, *_TIMES, *columns, "note"], "rows": cells}


def limits(results):
    def rate(name):
        scale, unit = _RATES[results.entry("limits", limit=name)["unit"]]
        return [results.rate(name) / scale, unit]

    return _table("Limits", ["limit"], ["rate", "unit"],
                  [([label], results.samples("limits", limit=name), lambda _, name=name: rate(name), results.reason("limits/gpu"))
                   for name, label in LIMITS.items()])


def optimizer(results):
    """Returns the table of optimizer steps. The share of the limit is the time that a copy of the same bytes would
    take, divided by the time of the step. The rate of the copy is that in the table Limits. For Tessera, `tessera
    bench` measures this rate between the steps."""
    copy = results.rate("copy")

    def row(name):
        tessera, entry = name in TESSERA_OPTIMIZERS, results.entry("optimizer", contender=name)

        def behind(median):
            limit_s = stats.median(entry["limits_s"]) if tessera else entry["bytes"] / copy if copy else None
            return [entry["bytes"] / median / 1e9, limit_s and limit_s / median]

        return ([f"{'Tessera' if tessera else 'PyTorch'} {name}", entry and entry["numel"]], results.samples("optimizer", contender=name),
                behind, results.reason("optimizer/tessera" if tessera else f"optimizer/{name}"))

    return _table("Optimizer step", ["contender", "parameters"], ["GB/s", "of the copy limit"],
                  map(row, TORCH_OPTIMIZERS + TESSERA_OPTIMIZERS))


def codecs(results):
    """The share of the limit is the time of a copy of as many bytes, divided by the time of the kernel. Both times are
    those of `tessera bench`."""
    return _table("Kernels of the codecs of the wire", ["kernel", "elements"], ["GB/s", "of the copy limit"],
                  [([entry["contender"], entry["numel"]], results.samples("codecs", contender=entry["contender"]),
                    lambda median, entry=entry: [entry["bytes"] / median / 1e9, stats.median(entry["limits_s"]) / median], "")
                   for entry in results.entries("codecs")])


def steps(results, work):
    """The column "model FLOP/s" is works.flops_per_token times tokens per second. Its share is relative to the rate of
    the matrix product in Limits."""
    gemm = results.rate("gemm")
    plain = results.samples("steps", work=work["name"], contender="torch_eager")

    def row(name):
        entry = results.entry("steps", work=work["name"], contender=name)

        def behind(median):
            rate = work["batch"] * work["model"]["seq_len"] / median
            return [rate, stats.median(plain) / median if plain else None,
                    flops_per_token(work["model"]) * rate / gemm if gemm else None,
                    1e3 * stats.median(entry["exposed_s"]) if entry.get("exposed_s") else None, _gibibytes(entry["device_bytes"]),
                    _gibibytes(entry.get("allocated_peak_bytes") or entry.get("allocated_bytes"))]

        return ([results.label(name)], results.samples("steps", work=work["name"], contender=name), behind,
                results.reason(f"{work['name']}/{name}"))

    return _table(work["title"], ["contender"],
                  ["tokens/s", "times as fast as PyTorch's plain module", "model FLOP/s of the matrix product's",
                   "exposed communication, ms", "GPU memory, GiB", "of it tensors, GiB"], map(row, work["contenders"]))


def _gibibytes(count):
    return None if count is None else count / 2**30


def launches(results):
    """Returns the table of steps in which the GPU waits for the host. "Over the plain module" is the extra time of a
    step compared with the plain module, divided by the number of units."""
    rows = []
    for entry in results.entries("launches"):
        samples, over = results.samples("launches", contender=entry["contender"]), entry["over_plain_unit_s"]
        rows.append([entry["contender"], len(samples), 1e3 * stats.median(samples),
                     1e6 * stats.median(over) if over else None])
    return {"title": "What a unit costs the host", "columns": ["contender", "rounds", "step, ms",
                                                                "over the plain module, us a unit"], "rows": rows}


def ratios(results):
    rows = [*_optimizer_ratios(results), *_codec_ratios(results), *_step_ratios(results), *_launch_ratios(results)]
    return {"title": "Targets", "columns": ["what", "peer", "Tessera", "target", "measured", "reached", "note"],
            "rows": rows}


def _ratio_row(results, what, peer, ours, target, theirs_s, ours_s, keys):
    """Makes a row. `keys`: keys of the tasks that measure ours_s and theirs_s."""
    measured = ratio(theirs_s, ours_s)
    note = "" if measured else results.reason(keys[0] if not ours_s else keys[1])
    return [what, peer, ours, target, measured, reached(measured, target), note]


def _optimizer_ratios(results):
    for peer, kernel, target in targets.OPTIMIZER["gpu"]:
        ours, theirs = (results.samples("optimizer", contender=contender) for contender in (kernel, peer))
        if peer == "limit":
            theirs = (results.entry("optimizer", contender=kernel) or {"limits_s": []})["limits_s"]
        yield _ratio_row(results, "optimizer", peer if peer == "limit" else f"PyTorch {peer}", kernel, target, theirs, ours,
                         ("optimizer/tessera", f"optimizer/{peer}"))


def _codec_ratios(results):
    for entry in results.entries("codecs"):
        name = entry["contender"]
        yield _ratio_row(results, "codec of the wire", "limit", name, targets.CODECS_OF_LIMIT, entry["limits_s"],
                         results.samples("codecs", contender=name), ("codecs/tessera", "codecs/tessera"))


def _step_ratios(results):
    for name, work in results.works.items():
        for of_work, peer, ours, target in targets.STEPS["gpu"]:
            if of_work in (None, name) and {peer, ours} <= set(work["contenders"]):
                theirs, mine = (results.samples("steps", work=name, contender=contender) for contender in (peer, ours))
                yield _ratio_row(results, f"step, {work['title']}", results.label(peer), results.label(ours), target, theirs, mine,
                                 (f"{name}/{ours}", f"{name}/{peer}"))


def _launch_ratios(results):
    """The ratio is 20 us divided by the cost of a unit. It is at least 1 if the target is reached."""
    for name, _, _, over_us in launches(results)["rows"]:
        if over_us is not None:
            yield [f"host time of a unit: {targets.UNIT_US} us over it", "plain module", name, 1.0,
                   targets.UNIT_US / over_us if over_us > 0 else None, "no" if over_us > targets.UNIT_US else "yes", f"{over_us:.1f} us"]


def gpu_tests(results):
    rows = [[test["name"], test["status"], test["seconds"]] for test in results.data["tests"]]
    return {"title": "Tests with label gpu", "columns": ["test", "status", "seconds"], "rows": rows}
