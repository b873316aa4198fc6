"""Formats numbers as the pages of results show them, and maps the ids of results and of CSV files to names for readers.
It uses the standard library only."""

_NAMES = {
    # Columns
    "contender": "who", "gustafson_efficiency": "efficiency", "over_fewest_ranks": "of the fewest ranks' work",
    "measured_over_formula": "measured / formula", "measured_over_plan": "measured / plan", "measured_ratio": "ratio",
    "communication_by_fit_s": "communication by the fit", "gain_over_per_tensor": "gain of a step",
    "communication_gain": "gain of the communication", "bucket_bytes": "bucket", "over_plain_s": "more than plain",
    "p10_s": "10th percentile", "p50_s": "median", "p90_s": "90th percentile", "p95_s": "95th percentile",
    "p99_s": "99th percentile", "bytes": "size", "dtype": "type", "subject": "of", "tokens_per_s": "tokens a second",
    "parameters_per_s": "parameters a second", "bytes_per_s": "bytes a second",
    # Optimizers
    "fused_fp32": "PyTorch, fused, fp32", "chain_bf16": "PyTorch, chain for bf16",
    "deepspeed_fp32": "DeepSpeed, fp32", "deepspeed_chain_bf16": "DeepSpeed, chain for bf16",
    "tessera fp32": "Tessera, fp32", "tessera mixed": "Tessera, bf16, fp32 moments",
    "tessera mixed_bf16_moments": "Tessera, bf16, bf16 moments",
    "tessera mixed_8bit_moments": "Tessera, bf16, 8-bit moments",
    "tessera fp32_bf16_moments": "Tessera, fp32, bf16 moments",
    "tessera fp32_8bit_moments": "Tessera, fp32, 8-bit moments",
    "tessera fp32 cached": "Tessera, fp32, with a cache",
    "tessera mixed cached": "Tessera, bf16, fp32 moments, with a cache",
    "tessera mixed_bf16_moments cached": "Tessera, bf16, bf16 moments, with a cache",
    "tessera mixed_8bit_moments cached": "Tessera, bf16, 8-bit moments, with a cache",
    # Disks
    "fio": "fio", "deepspeed_aio": "DeepSpeed's aio, its defaults",
    "deepspeed_aio_best": "DeepSpeed's aio, best of a sweep",
    "tessera threads": "Tessera, threads", "deepspeed_swapper": "DeepSpeed's swapper, fp32",
    "disk_limit": "the longer of disk and update", "cpu_s_per_gib": "CPU time a GiB",
    # Collectives
    "gloo": "Gloo", "tessera": "Tessera", "limit": "this machine's memory", "barrier": "barrier",
    "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather",
    "all_to_all": "all-to-all", "broadcast": "broadcast", "private": "private", "group": "the group's",
    "common": "common",
    # Peers that are not contenders, and models of `tessera bench buckets`
    "plan": "Tessera's plan", "per_tensor": "one collective a tensor", "resnet18": "ResNet-18", "gpt": "GPT",
    "resnet18 over Gloo": "ResNet-18 over Gloo", "gpt over Gloo": "GPT over Gloo",
    # Groups of ratios
    "python_step": "Step time of one Python model", "python_memory": "Peak memory of a rank, of one Python model",
    "step": "Step time", "peak_memory": "Peak memory of a rank", "optimizer": "Optimizer step",
    "optimizer_avx2": "Optimizer step with AVX2",
    "collective": "Collectives", "crowded_work": "Work a second with more ranks than cores",
    "crowded_step": "Step time with more ranks than cores", "buckets": "Step time with buckets of gradients",
    "disk": "Passes over a disk", "disk_cpu": "CPU time of passes over a disk",
    "disk_step": "Optimizer step with its state on disk",
    "buckets_communication": "Communication with buckets of gradients",
    # Workloads with their own section
    "python": "one Python model", "crowded": "more ranks than cores",
}


def size_label(size):
    """Returns bytes in powers of 1024, with at most one decimal, such as 4 B, 64 KiB, 1 MiB."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size:g} B"


def time_label(seconds):
    if seconds < 0:
        return "-" + time_label(-seconds)
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor * 0.9995:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def shown(column, value):
    """Returns the text of a cell of the page. It has a few digits, in the unit that ends the column's name."""
    if value is None:
        return "one a tensor" if column == "bucket_bytes" else ""
    if isinstance(value, str):
        return value
    if column.endswith("_s") and not column.endswith("_per_s"):
        return time_label(value)
    if column.endswith("bytes"):
        return size_label(value)
    if column in ("bytes_per_s", "parameters_per_s"):
        return f"{value / 1e9:.3g} G{'B' if column == 'bytes_per_s' else ''}/s"
    if column.endswith(("_fraction", "_limit")):
        return f"{100 * value:.0f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Names:
    """Maps ids to readable names. Titles of workloads come from the results."""

    def __init__(self, data):
        self._names = {work["name"]: work["title"] for work in data["works"]} | _NAMES

    def __call__(self, name):
        """Returns the readable name of an id, or the id itself if there is no such name."""
        return self._names.get(name, name)


def heading(column):
    """Returns a column's readable name. The unit is left out if the cells have the unit."""
    if column in _NAMES:
        return _NAMES[column]
    if column.endswith("_s") and not column.endswith("_per_s"):
        column = column.removesuffix("_s")
    return column.removesuffix("_bytes").replace("_", " ")


def counted(count, word):
    return f"{count} {word}" + ("" if count == 1 else "s")


def listed(words):
    """Returns "a", "a and b", or "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
