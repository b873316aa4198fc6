"""A network run's results as numbers, for net.csv and the page. It uses the standard library only.

A sample is the median of the timed steps of one run of a contender. There is one sample for each round. A ratio is
computed within each round, and its median over the rounds is shown. A load on the machine that lasts a whole round thus
slows both contenders of a ratio.
"""

import stats
import targets
from contenders import CONTENDERS
from net.rates import bits_per_s
from results import Results

COLUMNS = ("rate", "bits_per_s", "wire_bytes_per_s", "contender", "compressed", "samples", "median_s", "p10_s", "p90_s",
           "over_ddp", "over_fsdp2", "alone_s", "exposed_s", "link_bytes", "wire_s", "predicted_s", "predicted_off")


class NetResults(Results):
    def __init__(self, data):
        super().__init__(data)
        self.rates = data["runs"][-1]["rates"]

    def label(self, contender):
        """Returns the label of any contender, even of one that did not take part in the run."""
        return super().label(contender) if contender in self.contenders else CONTENDERS[contender].label

    def rounds(self, rate, name):
        return (self.entry("steps", rate=rate, contender=name) or {"rounds": []})["rounds"]

    def seconds(self, rate, name):
        """Returns {round: seconds of a step}."""
        return {run["round"]: stats.median(run["samples_s"]) for run in self.rounds(rate, name)}

    def alone(self, rate, name):
        """Returns {round: seconds} of the contender that makes the same computation on a single rank. DeepSpeed and a
        Python model run on PyTorch."""
        return self.seconds(rate, "tessera_alone" if CONTENDERS[name].family == "tessera" else "torch_alone")

    def exposed(self, rate, name):
        """Returns {round: the seconds of a step minus those of the computation on a single rank}."""
        alone = self.alone(rate, name)
        return {number: seconds - alone[number] for number, seconds in self.seconds(rate, name).items() if number in alone}

    def predicted(self, rate, name):
        """Returns the seconds of a step that `tessera plan` predicts; None if there is no prediction."""
        return _median(entry["seconds"] for entry in self.entries("predicted", rate=rate, contender=name))

    def wire_bytes_per_s(self, rate):
        """Returns the bytes per second that a connection carried in each direction, while both directions were used.
        Returns None if that was not measured."""
        return _median(entry["both_ways"] for entry in self.entries("wire", rate=rate))

    def link_bytes(self, rate, name):
        """Returns the bytes in a step on the busiest host's link, in its busier direction."""
        return _median(max(run["link_bytes"].values()) for run in self.rounds(rate, name) if run["link_bytes"])

    def row(self, rate, name):
        """Returns a line of net.csv as {column: value}. Returns None if the contender has no sample."""
        samples = self.seconds(rate, name)
        if not samples:
            return None
        of = stats.summary(list(samples.values()))
        speed, link, predicted = self.wire_bytes_per_s(rate), self.link_bytes(rate, name), self.predicted(rate, name)
        return dict(zip(COLUMNS, (
            rate, bits_per_s(rate), speed, self.label(name), self.contenders[name]["group"] == "compressed", of["n"],
            of["median"], of["p10"], of["p90"], ratio(samples, self.seconds(rate, "torch_ddp")),
            ratio(samples, self.seconds(rate, "torch_fsdp2")), _median(self.alone(rate, name).values()),
            None if self.is_alone(name) else _median(self.exposed(rate, name).values()), link,
            link / speed if link and speed else None, predicted, predicted / of["median"] - 1 if predicted else None), strict=True))

    def rows(self):
        return [row for rate in self.rates for name in self.contenders if (row := self.row(rate, name))]

    def predictions_off(self):
        """Returns |predicted / measured - 1| for all predictions."""
        return [abs(row["predicted_off"]) for row in self.rows() if row["predicted_off"] is not None]


def _median(values):
    values = list(values)
    return stats.median(values) if values else None


def ratio(ours, theirs):
    """Returns the median over the rounds of ours / theirs, two {round: seconds}; None if no round has both."""
    return _median(ours[number] / theirs[number] for number in ours if theirs.get(number, 0) > 0)


def table(results):
    """Returns the table of net.csv."""
    return {"title": "Steps over a network", "columns": list(COLUMNS), "rows": [list(row.values()) for row in results.rows()]}


def judged(results):
    """Returns every target as {"measure", "bits_per_s", "ours", "peer", "target", "ratio", "met"}. `ratio` and `met`
    are None if the target was not measured."""
    found = []
    measured = {bits_per_s(rate): rate for rate in results.rates}
    for measure, all_targets, seconds in (("step", targets.NET_STEPS, results.seconds), ("exposed", targets.NET_EXPOSED, results.exposed)):
        for ours, peer, of_rates in all_targets:
            for bits, target in of_rates.items():
                rate = measured.get(bits)
                value = ratio(seconds(rate, ours), seconds(rate, peer)) if rate else None
                found.append({"measure": measure, "bits_per_s": bits, "ours": results.label(ours),
                              "peer": results.label(peer), "target": target, "ratio": value,
                              "met": None if value is None else value <= target})
    return found
