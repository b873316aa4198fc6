"""Draws the pictures of docs/concepts.md from the output of `tessera plan` for a small model.

  drawings.py build/release/app/tessera           writes docs/pictures/{units,slots,memory}.svg
  drawings.py build/release/app/tessera --check   names the pictures that differ from the current plan
"""

import json
import pathlib
import subprocess
import sys
import tempfile

PICTURES = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "pictures"
MODEL = {"model": "gpt", "vocab_size": 256, "seq_len": 64, "layers": 4, "width": 128, "heads": 4}
STRATEGY = {"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "mixed_precision": {"param": "bf16"}, "host_sharing": False}
RANKS, HOSTS = 4, 2
STRATEGIES = ["NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]
# Categories of the plan that a picture of memory shows separately, with their names in the picture.
CATEGORIES = {"parameters": "parameters", "slots": "slots", "gradients": "gradients", "buckets": "buckets", "masters": "masters",
              "optimizer": "moments"}
LIGHT = {"a": ("#b6d7ff", "#0969da"), "b": ("#c6ecc9", "#1a7f37"), "c": ("#ffd8b5", "#bc4c00"), "d": ("#e3d4fb", "#8250df"),
         "e": ("#e6e8eb", "#57606a"), "f": ("#fbd0dc", "#bf3989")}
DARK = {"a": ("#123a6b", "#58a6ff"), "b": ("#14532d", "#3fb950"), "c": ("#6b3410", "#f0883e"), "d": ("#3c1e70", "#a371f7"),
        "e": ("#30363d", "#8b949e"), "f": ("#611d38", "#f778ba")}
WIDTH = 760


def plan(tessera, **changes):
    with tempfile.TemporaryDirectory() as folder:
        model, strategy = pathlib.Path(folder) / "model.json", pathlib.Path(folder) / "strategy.json"
        model.write_text(json.dumps(MODEL))
        strategy.write_text(json.dumps(STRATEGY | changes))
        said = subprocess.run([tessera, "plan", "--model", model, "--strategy", strategy, "--world-size", str(RANKS), "--hosts", str(HOSTS),
                               "--json"], check=True, capture_output=True, text=True)
    return json.loads(said.stdout)


def picture(title, about, height, body):
    def colours(of):
        return "\n".join(f"    .{name} {{ fill: {fill}; stroke: {line}; }}" for name, (fill, line) in of.items())

    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title desc">
  <title id="title">{title}</title>
  <desc id="desc">{about}</desc>
  <style>
    text {{ font: 14px sans-serif; fill: #1f2328; }}
    .in {{ text-anchor: middle; }}
    .right {{ text-anchor: end; }}
    .card {{ fill: #ffffff; stroke: #8c959f; }}
{colours(LIGHT)}
    @media (prefers-color-scheme: dark) {{
    text {{ fill: #e6edf3; }}
    .card {{ fill: #0d1117; stroke: #6e7681; }}
{colours(DARK)}
    }}
  </style>
  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="6"/>
{chr(10).join('  ' + line for line in body)}
</svg>
"""


def box(kind, x, y, width, height, text=""):
    yield f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"/>'
    if text:
        yield f'<text class="in" x="{x + width / 2:.1f}" y="{y + height / 2 + 5:.1f}">{text}</text>'


def label(x, y, text, kind=""):
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:.1f}" y="{y:.1f}">{text}</text>'


def kib(number):
    return f"{number / 1024:.0f} KiB"


def draw_units(full):
    """Draws each unit as a bar as long as its buffer, cut into one shard for each rank."""
    units, body = full["units"], []
    scale = 470 / max(unit["parameters"] + unit["padding"] for unit in units)
    for row, unit in enumerate(units):
        y, numel = 62 + 44 * row, unit["parameters"] + unit["padding"]
        assert numel % RANKS == 0
        shard = scale * numel / RANKS
        body.append(label(20, y + 21, unit["name"]))
        for rank in range(RANKS):
            body += box("abcd"[rank], 130 + rank * shard, y, shard, 32, str(rank))
        body.append(label(614, y + 21, f"{numel // RANKS:,} a rank"))
    head = [label(20, 30, f"{full['parameters']:,} parameters in {len(units)} units, on {RANKS} ranks: the number is the rank that holds the shard")]
    return picture("Units and shards", "Each unit is one flat buffer, which is cut into an equal shard for each rank.", 62 + 44 * len(units) + 12,
                   head + body)


def draw_slots(full):
    """Draws which unit is in which slot while forward computes. The plan's bytes are the bytes of these slots."""
    units = full["units"]
    root, blocks = units[0], units[1:]
    largest = max(unit["gathered_bytes"] for unit in blocks)
    assert full["bytes"]["slots"] == root["gathered_bytes"] + 2 * largest, "the plan has other slots than this picture"
    left, wide, body = 190, 100, []
    body.append(label(20, 30, f"slots of a rank: {kib(root['gathered_bytes'])} + 2 x {kib(largest)} = {kib(full['bytes']['slots'])}"))
    body.append(label(20, 76, "computing"))
    for at, name in enumerate(["(root)", *(unit["name"] for unit in blocks)]):
        body += box("e", left + at * wide, 54, wide - 4, 32, name)
    body.append(label(20, 130, "slot of the root"))
    body += box("b", left, 108, 5 * wide - 4, 32, "(root)")
    for slot in range(2):
        y = 154 + 46 * slot
        body.append(label(20, y + 22, f"slot {slot + 1}"))
        for at, unit in enumerate(blocks):
            if at % 2 == slot:
                # A unit is gathered while the unit before it computes, and stays until another unit takes its slot.
                end = at + 2 if at + 2 < len(blocks) else 1 + len(blocks)
                body += box("a", left + at * wide, y, wide - 4, 32, "gather")
                body += box("b", left + (at + 1) * wide, y, (end - at - 1) * wide - 4, 32, unit["name"])
    return picture("Slots", "While one unit computes, the next is gathered into the other slot.", 250, body)


def draw_memory(plans):
    most = max(one["total_bytes"] for one in plans.values())
    body, x = [], 20
    for kind, (category, name) in zip("abcdef", CATEGORIES.items()):
        body += box(kind, x, 18, 16, 16)
        body.append(label(x + 22, 31, name))
        x += 120
    for row, (strategy, one) in enumerate(plans.items()):
        y, x = 56 + 40 * row, 170.0
        body.append(label(20, y + 20, strategy))
        for kind, category in zip("abcdef", CATEGORIES):
            width = 480 * one["bytes"][category] / most
            if width > 0:
                body += box(kind, x, y, width, 28)
                x += width
        assert sum(one["bytes"][category] for category in CATEGORIES) == one["total_bytes"], "the plan has a category more"
        body.append(label(x + 8, y + 20, kib(one["total_bytes"])))
    return picture("Memory of a rank under each strategy", f"Bytes of one of {RANKS} ranks on {HOSTS} hosts, by category.",
                   56 + 40 * len(plans) + 12, body)


def main(tessera, check=False):
    plans = {strategy: plan(tessera, strategy=strategy) for strategy in STRATEGIES}
    full, differ = plans["FULL_SHARD"], []
    for name, text in (("units", draw_units(full)), ("slots", draw_slots(full)), ("memory", draw_memory(plans))):
        file = PICTURES / f"{name}.svg"
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            differ.append(f"docs/pictures/{name}.svg is not what the plan says. hint: scripts/site/drawings.py {tessera}")
    print("\n".join(differ) or f"three pictures show the plan of {full['parameters']:,} parameters on {RANKS} ranks")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], check=sys.argv[2:] == ["--check"]))
