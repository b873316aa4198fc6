"""Writes a GPU run's results as Markdown, without pictures, since the machine of a GPU need not have matplotlib. It
uses the standard library only.
"""

import page
from gpu import tables

_FORMULA = ("A step's model FLOP/s: tokens a second times 6 FLOP for each parameter of a matrix product and "
            "12 * layers * width * sequence length for attention (PaLM, arXiv 2204.02311, appendix B); "
            "what is computed again in backward does not count.")
_MEMORY = ("GPU memory is what the process added to the GPU at its peak, CUDA and allocator included. Tensors: "
           "PyTorch's own count in the timed steps, with activations; for Tessera the Engine's memory, without them.")


def _facts(data):
    gpu = data["gpu"]
    more = [("GPU", f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, driver {gpu['driver']}, "
                    f"power limit {gpu['power_limit_w']} W")] if gpu else []
    return "\n".join([*page.markdown_lines([["", ""], ["---", "---"], *page.facts(data, more)]), ""])


def _noted(title, entries):
    lines = [f"## {title}", ""]
    for what, first, rest in page.noted({"failed": [], "not_run": []} | entries):
        lines += [f"- {what}: {first}"]
        lines += ["", "  ```", *(f"  {line}" for line in rest), "  ```", ""] if rest else []
    return "\n".join([*lines, ""]) if len(lines) > 2 else ""


def text(data):
    results = tables.GpuResults(data)
    tests, checks = tables.gpu_tests(results), page.checked(data, str)
    parts = [f"# Tessera on {data['gpu']['name'] if data['gpu'] else 'the CPU'}\n", f"**{page.SMOKE_TEST}**\n" if data["quick"] or not data["gpu"] else "",
             _facts(data), "\n".join(["Verified in this run:", "", *(f"- {check}" for check in checks), ""]) if checks else "",
             *(page.markdown_table(make(results)) for make in (tables.ratios, tables.limits, tables.optimizer)),
             page.markdown_table(tables.codecs(results)) if data.get("codecs") else "",
             page.markdown_table(tables.launches(results)) if data["launches"] else "",
             *(page.markdown_table(tables.steps(results, work)) for work in data["works"]), f"{_FORMULA}\n", f"{_MEMORY}\n",
             page.markdown_table(tests) if tests["rows"] else "No test was run.\n",
             _noted("Failed", {"failed": data["failed"]}), _noted("Not run", {"not_run": data["not_run"]})]
    return "\n".join(part for part in parts if part)


def write(data, folder, name):
    """Writes the page under this name."""
    (folder / f"{name}.md").write_text(text(data))
