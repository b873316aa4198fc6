"""The results of a run: their file, FILE.json.xz, and the look-ups that all tables share. It uses the standard library only.

One object:

    schema, where        "host", "net" or "gpu"
    quick                whether the run is a smoke test, whose figures have no meaning
    runs         [{command, sections, started, seconds, rounds, commit {hash, dirty}, machine {...} or null, ...}]
                         the latest run, and earlier runs with those of their sections that are still here
    versions     {...}
    contenders   [{name, family, label, group, stage, private_copies}]
    works        [{name, title, model, dtype, parameters, batch, steps, warm_up, contenders}]
    checks       [{work, result}]                           the verified fact
    failed, not_run  [{key: "section/what", what, round, why}]    round: the round in which it failed, or the first
                         round in which it was not run; null before and after the rounds. An entry that belongs to no
                         section has a key without a slash
    thinned_to   how many samples of each long list are left, if the file would have been too large

The sections' entries are listed in the measure.py for host, network or GPU. Samples are seconds, and lists that hold
only numbers keep 9 significant digits. Long lists of single calls are in order of size. The file has them as whole
nanoseconds, the resolution of clocks: {"ns": [the first sample, and by how much each is longer than the sample
before]}. read() gives the list of seconds.
"""

import itertools
import json
import lzma

import stats

SCHEMA = 3
MOST_BYTES = 200_000
LONG, DIGITS = 100, 9
# This table names the section of --only to which each list's entries belong. None: they belong to the workload that
# each entry names.
SECTIONS = {"steps": None, "memory": None, "checks": None, "optimizer": "optimizer", "optimizer_avx2": "optimizer",
            "collectives": "collectives", "disk": "disk", "disk_steps": "disk", "limits": "limits", "launches": "launches", "codecs": "codecs"}


def _are_samples(value):
    return all(isinstance(each, float) for each in value)


def _packed(value):
    """Returns the value in the form in which it is stored in the file."""
    if isinstance(value, dict):
        return {name: _packed(each) for name, each in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if not _are_samples(value):
        return [_packed(each) for each in value]
    if len(value) >= LONG and all(before <= after for before, after in itertools.pairwise(value)):
        whole = [round(1e9 * each) for each in value]
        return {"ns": whole[:1] + [after - before for before, after in itertools.pairwise(whole)]}
    return [float(f"{each:.{DIGITS}g}") for each in value]


def _unpacked(value):
    return [1e-9 * nanoseconds for nanoseconds in itertools.accumulate(value["ns"])] if value.keys() == {"ns"} else value


def _thinned(value, most):
    """Returns the value with at most `most` samples in each list, evenly spread."""
    if isinstance(value, dict):
        return {name: _thinned(each, most) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return stats.thinned([_thinned(each, most) for each in value], most if _are_samples(value) else len(value))
    return value


def _longest(value):
    if isinstance(value, dict):
        return max(map(_longest, value.values()), default=0)
    if isinstance(value, (list, tuple)):
        return len(value) if _are_samples(value) else max(map(_longest, value), default=0)
    return 0


def write(path, data, most_bytes=MOST_BYTES):
    """Thins the longest lists evenly until the file has at most `most_bytes`. Returns the data that were written."""
    while True:
        text = json.dumps(_packed(data), separators=(",", ":")) + "\n"
        packed = lzma.compress(text.encode(), preset=9)
        if len(packed) <= most_bytes:
            path.write_bytes(packed)
            return json.loads(text, object_hook=_unpacked)
        most = _longest(data) * 3 // 4
        if most < 2:
            raise ValueError(f"{path.name} has {len(packed)} bytes without samples, more than the {most_bytes} that a run may have")
        data = _thinned(data, most) | {"thinned_to": most}


def read(path):
    """Reads results. Raises ValueError for results of another form."""
    data = json.loads(lzma.decompress(path.read_bytes()), object_hook=_unpacked)
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has results of schema {data.get('schema')!r}; this is for {SCHEMA}")
    return data


def section_of(key):
    """Returns the section of --only to which a failure belongs. Returns None for a failure of the build or the
    tests."""
    return key.split("/")[0] if "/" in key else None


def added(earlier, new, names):
    """Returns `new`, which has measured the sections `names`, completed with the other sections of `earlier`. The tests
    come from the new run if it has any."""
    def kept(name, section):
        return [entry for entry in earlier.get(name, []) if section(entry) not in names]

    def united(name):
        known = {entry["name"] for entry in new[name]}
        return [entry for entry in earlier[name] if entry["name"] not in known] + new[name]

    merged = earlier | new | {"versions": earlier["versions"] | new["versions"], "contenders": united("contenders")}
    before = [run | {"sections": [name for name in run["sections"] if name not in names]} for run in earlier["runs"]]
    merged["runs"] = [run for run in before if run["sections"]] + new["runs"]
    # A workload that was not measured this time stays as it was, even if other contenders take part now.
    old_works = {work["name"]: work for work in earlier["works"] if work["name"] not in names}
    merged["works"] = list(({work["name"]: work for work in new["works"]} | old_works).values())
    for name, section in SECTIONS.items():
        if name in earlier or name in new:
            merged[name] = kept(name, lambda entry: section or entry["work"]) + new.get(name, [])
    if "tessera_bench" in earlier:
        old = {name: found for name, found in earlier["tessera_bench"].items() if f"tessera:{name}" not in names}
        merged["tessera_bench"] = old | new["tessera_bench"]
    if "tests" in earlier:
        merged["tests"] = new["tests"] or earlier["tests"]
    for name in ("failed", "not_run"):
        old = kept(name, lambda entry: section_of(entry["key"]))
        merged[name] = [entry for entry in old if section_of(entry["key"]) or not new.get("tests")] + new[name]
    return merged


class Results:
    """Results with functions that look up entries. If the run does not have a workload or contender, its name is
    shown."""

    def __init__(self, data):
        self.data = data
        self.works = {work["name"]: work for work in data["works"]}
        self.contenders = {contender["name"]: contender for contender in data["contenders"]}

    def label(self, contender):
        return self.contenders.get(contender, {}).get("label", contender)

    def is_alone(self, contender):
        """Returns whether the contender communicates with nobody."""
        return self.contenders[contender]["group"] == "alone"

    def entries(self, section, **key):
        """Returns the entries of the section with these fields. The list is empty if there is no such section."""
        return [entry for entry in self.data.get(section, []) if all(entry.get(name) == value for name, value in key.items())]

    def entry(self, section, **key):
        """Returns the first entry of the section with these fields, or None if there is no such entry."""
        return next(iter(self.entries(section, **key)), None)

    def samples(self, section, what="rounds_s", **key):
        """Returns the samples of all rounds of the entry with these fields. The list is empty if there is no such
        entry."""
        return [sample for samples in (self.entry(section, **key) or {}).get(what, []) for sample in samples]

    def reason(self, key):
        """Returns the reason why the task `key` has no result."""
        for section, verb in (("failed", "failed"), ("not_run", "not run")):
            for entry in self.data[section]:
                if entry["key"] == key:
                    return f"{verb}: {entry['why'].strip().splitlines()[-1][:120]}"
        return "not run: it was not asked for"
