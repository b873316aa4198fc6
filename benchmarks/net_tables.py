"""A network run's results as numbers: what net.csv holds and net_page.py shows. Standard library only.

A sample is the median of the timed steps of one run of a contender: one a round. A ratio is the median over the rounds
of the ratios within a round, so that what slows the machine for a whole round slows both.
"""

import stats
from net_contenders import CONTENDERS, bits_per_s

GBIT = 10**9
# (Tessera's contender, its peer, {bits a second: target}) of step times, its own over the peer's.
STEPS = (
    ("tessera_no_shard", "torch_ddp", {10 * GBIT: 1.0, 2 * GBIT: 1.0, GBIT: 0.95}),
    ("tessera_lossless", "torch_ddp", {10 * GBIT: 1.0, 2 * GBIT: 1.0, GBIT: 0.95}),
    ("tessera_full_shard", "torch_fsdp2", {2 * GBIT: 0.5, GBIT: 0.5}),
    ("python_full_shard", "torch_fsdp2", {2 * GBIT: 0.5, GBIT: 0.5}),
    ("tessera_int8", "torch_ddp_power_sgd", {GBIT // 5: 1.0}),
    ("tessera_power_sgd", "torch_ddp_power_sgd", {GBIT // 5: 1.0}),
)
# The same of what a step takes beyond the computation of one rank alone.
EXPOSED = (
    ("tessera_int8", "tessera_no_shard", {GBIT // 5: 0.35}),
    ("tessera_power_sgd", "tessera_no_shard", {GBIT // 5: 0.10}),
)
_LABELS = {contender.name: contender.label for contender in CONTENDERS}  # also of those that a run leaves out
COLUMNS = ("rate", "bits_per_s", "wire_bytes_per_s", "contender", "compressed", "samples", "median_s", "p10_s", "p90_s",
           "over_ddp", "over_fsdp2", "alone_s", "exposed_s", "link_bytes", "wire_s", "predicted_s", "predicted_off")
# Of |predicted / measured - 1| over all rates and contenders.
PREDICTED_WITHIN, PREDICTED_MEDIAN = 0.10, 0.05


class Results:
    """results.json, with the look-ups that tables and page share."""

    def __init__(self, data):
        self.data = data
        self.contenders = {contender["name"]: contender for contender in data["contenders"]}
        self.rates = data["rates"]

    def label(self, name):
        return self.contenders[name]["label"] if name in self.contenders else _LABELS.get(name, name)

    def _entry(self, rate, name):
        for entry in self.data["steps"]:
            if (entry["rate"], entry["contender"]) == (rate, name):
                return entry
        return {"rounds": []}

    def samples(self, rate, name):
        """{round: seconds of a step}."""
        return {run["round"]: stats.median(run["samples_s"]) for run in self._entry(rate, name)["rounds"]}

    def alone_of(self, name):
        """The contender whose rank alone computes the same. DeepSpeed and a Python model run on PyTorch."""
        return "tessera_alone" if name.startswith("tessera") else "torch_alone"

    def exposed(self, rate, name):
        """{round: seconds that a step takes beyond the computation of one rank alone}."""
        alone = self.samples(rate, self.alone_of(name))
        return {number: seconds - alone[number] for number, seconds in self.samples(rate, name).items()
                if number in alone}

    def predicted(self, rate, name):
        """Seconds of a step that `tessera plan` predicts; None if nobody asked it."""
        seconds = [entry["seconds"] for entry in self.data.get("predicted", [])
                   if (entry["rate"], entry["contender"]) == (rate, name)]
        return stats.median(seconds) if seconds else None

    def predictions_off(self):
        """|predicted / measured - 1| of all that was predicted."""
        pairs = [(self.predicted(rate, name), self.samples(rate, name)) for rate in self.rates for name in self.contenders]
        return [abs(predicted / stats.median(list(samples.values())) - 1) for predicted, samples in pairs
                if predicted and samples]

    def wire_bytes_per_s(self, rate):
        """What a connection carried each way, both ways at once. None if that was not measured."""
        speeds = [entry["both_ways"] for entry in self.data["wire"] if entry["rate"] == rate]
        return stats.median(speeds) if speeds else None

    def link_bytes(self, rate, name):
        """Of the busier direction of the busiest host's link, in a step."""
        counts = [max(run["link_bytes"].values()) for run in self._entry(rate, name)["rounds"] if run["link_bytes"]]
        return stats.median(counts) if counts else None

    def row(self, rate, name):
        """A line of net.csv as {column: value}; None if the contender has no sample."""
        samples = self.samples(rate, name)
        if not samples:
            return None
        of = stats.summary(list(samples.values()))
        alone = list(self.samples(rate, self.alone_of(name)).values())
        exposed = [] if self.contenders[name]["alone"] else list(self.exposed(rate, name).values())
        speed, link = self.wire_bytes_per_s(rate), self.link_bytes(rate, name)
        predicted = self.predicted(rate, name)
        return dict(zip(COLUMNS, (
            rate, bits_per_s(rate), speed, self.label(name), self.contenders[name]["compressed"], of["n"],
            of["median"], of["p10"], of["p90"], ratio(samples, self.samples(rate, "torch_ddp")),
            ratio(samples, self.samples(rate, "torch_fsdp2")), stats.median(alone) if alone else None,
            stats.median(exposed) if exposed else None, link, link / speed if link and speed else None, predicted,
            predicted / of["median"] - 1 if predicted else None), strict=True))


def ratio(ours, theirs):
    """Of {round: seconds}; None without a round that has both."""
    common = [number for number in ours if number in theirs and theirs[number] > 0]
    return stats.median([ours[number] / theirs[number] for number in common]) if common else None


def table(results):
    """{"columns", "rows"} of net.csv."""
    rows = [results.row(rate, name) for rate in results.rates for name in results.contenders]
    return {"columns": list(COLUMNS), "rows": [list(row.values()) for row in rows if row]}


def judged(results):
    """Every target as {"measure", "rate", "ours", "peer", "target", "ratio", "met"}; ratio and met are None where it
    was not measured."""
    found = []
    measured = {bits_per_s(rate): rate for rate in results.rates}
    for measure, targets, seconds in (("step", STEPS, results.samples), ("exposed", EXPOSED, results.exposed)):
        for ours, peer, of_rates in targets:
            for bits, target in of_rates.items():
                rate = measured.get(bits)
                value = ratio(seconds(rate, ours), seconds(rate, peer)) if rate else None
                found.append({"measure": measure, "bits_per_s": bits, "ours": results.label(ours),
                              "peer": results.label(peer), "target": target, "ratio": value,
                              "met": None if value is None else value <= target})
    return found
