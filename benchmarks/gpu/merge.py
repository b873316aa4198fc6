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
    for name in ("contenders", "works"):
        known = {entry["name"] for entry in new[name]}
        merged[name] = [entry for entry in earlier[name] if entry["name"] not in known] + new[name]
    for name in _SECTIONS:
        merged[name] = new[name] if name in names else earlier[name]
    for name in ("steps", "checks"):
        merged[name] = kept(earlier[name], lambda entry: entry["work"]) + new[name]
    merged["tests"] = new["tests"] or earlier["tests"]
    for name in ("failed", "not_run"):
        old = kept(earlier[name], lambda entry: section_of(entry["key"]))
        if new["tests"]:
            old = [entry for entry in old if entry["key"] != "tests"]
        merged[name] = old + new[name]
    return merged
