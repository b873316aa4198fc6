"""A run's results beside those of earlier runs, section by section. Standard library only."""

_SECTIONS = {"limits": "limits", "optimizer": "optimizer", "launches": "launches"}


def section_of(key):
    """Which of run_gpu's --only names a failure's key, such as "steps/gpt_7b/torch_ddp", belongs to; None: to no one."""
    head, *rest = key.split("/")
    return rest[0] if head in ("steps", "checks") and rest else _SECTIONS.get(head)


def added(earlier, new, names):
    """`new`, which measured the sections `names`, with what `earlier` has of the others. Tests are the new run's if it has any."""
    def kept(entries, section):
        return [entry for entry in entries if section(entry) not in names]

    merged = dict(new)
    before = [run | {"sections": [name for name in run["sections"] if name not in names]} for run in earlier["runs"]]
    merged["runs"] = [run for run in before if run["sections"]] + new["runs"]
    merged["versions"] = earlier["versions"] | new["versions"]
    known = {entry["name"] for entry in new["contenders"]}
    merged["contenders"] = [entry for entry in earlier["contenders"] if entry["name"] not in known] + new["contenders"]
    of_works = {work["name"]: work for work in new["works"]}
    # A work that was not measured now has its rows as before, whoever takes part now.
    kept_works = {work["name"]: work for work in earlier["works"] if work["name"] not in names}
    merged["works"] = list((of_works | kept_works).values())
    for name in _SECTIONS:
        merged[name] = new[name] if name in names else earlier[name]
    for name in ("steps", "checks"):
        merged[name] = kept(earlier[name], lambda entry: entry["work"]) + new[name]
    merged["tests"] = new["tests"] or earlier["tests"]
    for name in ("failed", "not_run"):
        old = kept(earlier[name], lambda entry: section_of(entry["key"]))
        if new["tests"]:
            old = [entry for entry in old if section_of(entry["key"]) is not None]
        merged[name] = old + new[name]
    return merged
