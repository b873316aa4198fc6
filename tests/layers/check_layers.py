"""No folder includes upwards, and the folders below LibTorch include none of it.

Usage: check_layers.py ROOT
"""

import pathlib
import re
import sys

# Folder -> folders whose headers it may include (besides its own), as in docs/design.md. The longest prefix counts, so a
# room of a folder has rules of its own. An entry that names a file allows that file alone.
GROUND = ["runtime/base", "runtime/config"]
SUM = [*GROUND, "runtime/comm", "runtime/comm/sum"]
LOCAL = [*SUM, "runtime/comm/local"]
COMPOSE = [*LOCAL, "runtime/comm/compose"]
SHARED = [*COMPOSE, "runtime/comm/shared"]
C10D = [*SHARED, "include/tessera/error.h"]
DEVICE = [*C10D, "runtime/comm/c10d"]
NCCL = [*DEVICE, "runtime/comm/device"]
CUDA_HOST = [*SHARED, "runtime/comm/device"]
COMM = [*NCCL, "runtime/comm/nccl", "runtime/comm/cuda_host", "runtime/comm/job"]
SHARDING = ["sharding", "sharding/layout"]
ENGINE_GROUND = [*GROUND, "runtime/data", *COMM, *SHARDING, "optim", "include/tessera"]
ALLOWED = {
    "runtime/base": [],
    "runtime/config": ["runtime/base"],
    "runtime/comm": GROUND,
    "runtime/comm/sum": [*GROUND, "runtime/comm"],
    "runtime/comm/local": SUM,
    "runtime/comm/compose": LOCAL,
    "runtime/comm/shared": COMPOSE,
    "runtime/comm/c10d": SHARED,
    "runtime/comm/device": DEVICE,
    "runtime/comm/nccl": NCCL,
    "runtime/comm/cuda_host": CUDA_HOST,
    "runtime/comm/job": COMM,
    "runtime/launch": ["runtime/base"],
    "runtime/data": ["runtime/base"],
    "sharding/layout": GROUND,
    "sharding": [*GROUND, *SHARED, "sharding/layout", "include/tessera/error.h"],
    "optim": GROUND,
    "include/tessera": [*GROUND, "runtime/comm", "runtime/data", "sharding/layout"],
    "engine/init": ENGINE_GROUND,
    "engine/device": ENGINE_GROUND,
    "engine/memory": [*ENGINE_GROUND, "engine/device"],
    "engine/step": [*ENGINE_GROUND, "engine/device", "engine/memory"],
    "engine": [*ENGINE_GROUND, "engine/init", "engine/device", "engine/memory", "engine/step"],
    "models": GROUND,
    "benchmarks/native": [*GROUND, *SHARED, "optim"],
    "benchmarks/native/studies": [*GROUND, "runtime/comm", "runtime/comm/local", "runtime/data", "sharding/layout", "models",
                                  "benchmarks/native", "include/tessera"],
    "app": [*GROUND, *COMM, "runtime/launch", "runtime/data", "engine", "engine/device", "engine/memory", "sharding/layout", "optim",
            "models", "benchmarks/native", "benchmarks/native/studies", "include/tessera"],
    "examples": ["include/tessera", "models", *GROUND, "runtime/data"],
}
FREE_OF_TORCH = ["runtime/base", "runtime/config", "runtime/launch", "runtime/data", "sharding/layout", "optim",
                 "runtime/comm/sum", "runtime/comm/local", "runtime/comm/compose", "runtime/comm/shared"]
SOURCES = (".h", ".cc", ".cu", ".cuh")
# Stands in for the folder of headers that LibTorch's wheel lacks.
GLOO_STUBS = "runtime/comm/c10d/gloo_stubs"
TORCH = re.compile(r"^(ATen|c10|torch|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def layer_of(path):
    fits = [layer for layer in ALLOWED if path == layer or path.startswith(layer + "/")]
    return max(fits, key=len) if fits else None


def target_of(root, source, name):
    """The file that an include names, relative to the root; None for what is not ours."""
    for base in (root, root / "include", root / GLOO_STUBS, source.parent):
        candidate = (base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def complaints(root, source):
    own = layer_of(source.relative_to(root).as_posix())
    for bracket, name in INCLUDE.findall(source.read_text(encoding="utf-8")):
        if TORCH.match(name):
            if own in FREE_OF_TORCH:
                yield f"includes {name}, but {own} is free of LibTorch"
            if name == "torch/torch.h":
                yield "includes torch/torch.h, which costs 25 s a file"
            continue
        target = target_of(root, source, name)
        if target is None:
            if bracket == '"':
                yield f'includes "{name}", which is no file of this project'
            continue
        if bracket == "<" and own != "examples":  # examples are written as a user writes
            yield f'includes <{name}>, a header of this project: write "{name}"'
        layer = layer_of(target)
        if layer != own and target not in ALLOWED[own] and layer not in ALLOWED[own]:
            yield f"includes {name}: {own} may not see {layer}"


def sources_of(root, layer):
    for source in sorted((root / layer).rglob("*")):
        if source.suffix in SOURCES and layer_of(source.relative_to(root).as_posix()) == layer:
            yield source


def main(root):
    root = pathlib.Path(root).resolve()
    found, seen = [], 0
    for layer in ALLOWED:
        for source in sources_of(root, layer):
            seen += 1
            found += [f"{source.relative_to(root)}: {text}" for text in complaints(root, source)]
    print("\n".join(found) or f"{seen} files keep to their layers")
    return 1 if found or seen < 50 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
