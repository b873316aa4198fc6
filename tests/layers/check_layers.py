"""Checks that no folder includes upwards, and that the folders below LibTorch do not include LibTorch. Public headers
must be usable alone, and only one room may depend on LibTorch's version.

Usage: check_layers.py ROOT
"""

import pathlib
import re
import sys

# Maps a folder to the folders whose headers it may include (besides its own), as in docs/design.md. The longest prefix
# counts, so a room inside a folder has its own rules. An entry that names a file allows only that file.
#
# The public headers that do not use LibTorch, and that layers below LibTorch share with users.
PUBLIC_BASE = ["include/tessera/dtype.h", "include/tessera/exit_code.h", "include/tessera/metric.h", "include/tessera/span.h"]
PUBLIC_CONFIG = [*PUBLIC_BASE, "include/tessera/compression_methods.h", "include/tessera/optimizer_types.h", "include/tessera/strategy.h",
                 "include/tessera/transports.h"]
PUBLIC_COMM = ["include/tessera/mesh.h", "include/tessera/topology.h"]
PUBLIC_DATA = ["include/tessera/token_options.h"]
PUBLIC_LAYOUT = ["include/tessera/memory.h"]
PUBLIC_SHARDING = ["include/tessera/comm_hook.h", "include/tessera/observe_pointers.h"]
PUBLIC_OFFLOAD = ["include/tessera/existing.h"]
PUBLIC_MODELS = ["include/tessera/tensor_names.h"]
GROUND = ["runtime/base", "runtime/config", *PUBLIC_CONFIG]
INTERFACE = [*GROUND, *PUBLIC_COMM]
SUM = [*INTERFACE, "runtime/comm", "runtime/comm/sum"]
LOCAL = [*SUM, "runtime/comm/local"]
COMPOSE = [*LOCAL, "runtime/comm/compose"]
SHARED = [*COMPOSE, "runtime/comm/rounds", "runtime/comm/shared"]
DEVICE = [*SHARED, "runtime/torch", "runtime/comm/c10d"]
MPI = [*SHARED, "runtime/comm/c10d"]
NCCL = [*DEVICE, "runtime/comm/device"]
CUDA_HOST = [*SHARED, "runtime/comm/device"]
COMM = [*NCCL, "runtime/comm/mpi", "runtime/comm/nccl", "runtime/comm/cuda_host", "runtime/comm/job"]
PLANNER = ["planner", "planner/measured", "planner/modes", "planner/script"]
OFFLOAD = ["offload", "offload/files", "offload/io"]
CHECKPOINT = ["checkpoint", "checkpoint/files"]
OPTIM = ["optim", "optim/arithmetic", "optim/cuda"]
LAYOUT = ["sharding/layout", "sharding/compress", "sharding/layout/plan", *PUBLIC_LAYOUT]
SHARDING = ["sharding", *LAYOUT]
REDUCE = [*SHARDING, "sharding/gather", "sharding/reduce", "sharding/reduce/pack"]
ENGINE_GROUND = [*GROUND, "runtime/base/metrics", "runtime/border", "runtime/torch", "runtime/data", *COMM, *REDUCE, *PLANNER, *OPTIM, *OFFLOAD, *CHECKPOINT,
                 "include/tessera"]
MEMORY = [*ENGINE_GROUND, "engine/device", "engine/memory/records", "engine/memory"]
REPLAY = [*MEMORY, "engine/replay"]
STEP = [*REPLAY, "engine/step/agree", "engine/step/rules", "engine/step"]
ENGINE = ["engine/autograd", "engine/activations", "engine/checkpoint", "engine/weights", "engine/init", "engine/device", "engine/memory", "engine/memory/records",
          "engine/replay", "engine/step", "engine/step/agree", "engine/step/rules", "engine/step/queued", "engine/loop", "engine/job", "engine/parameters",
          "engine/asynchronous", "engine/training"]
COMMAND = [*GROUND, "runtime/base/metrics", "runtime/border", *COMM, "workshop/launch", "workshop/tokenizer", "runtime/data", "engine", "engine/device", "engine/job",
           "engine/memory", "engine/replay", "sharding/layout", "sharding/layout/plan", *PLANNER, *OPTIM, *OFFLOAD, *CHECKPOINT, "workshop/models", "workshop/bench", "workshop/bench/studies",
           "include/tessera", "workshop/app"]
ALLOWED = {
    "runtime/base": PUBLIC_BASE,
    "runtime/base/metrics": ["runtime/base", *PUBLIC_BASE],
    "runtime/config": ["runtime/base", *PUBLIC_CONFIG],
    "runtime/config/keys": ["runtime/base", "runtime/config", *PUBLIC_CONFIG],
    "runtime/config/rules": ["runtime/base", "runtime/config", *PUBLIC_CONFIG],
    "runtime/border": ["runtime/base", "include/tessera/error.h"],
    "runtime/torch": [],
    "runtime/comm": INTERFACE,
    "runtime/comm/sum": [*INTERFACE, "runtime/comm"],
    "runtime/comm/local": SUM,
    "runtime/comm/compose": LOCAL,
    "runtime/comm/rounds": [*INTERFACE, "runtime/comm"],
    "runtime/comm/shared": COMPOSE,
    "runtime/comm/c10d": [*SHARED, "runtime/torch"],
    "runtime/comm/device": DEVICE,
    "runtime/comm/mpi": MPI,
    "runtime/comm/nccl": NCCL,
    "runtime/comm/cuda_host": CUDA_HOST,
    "runtime/comm/job": COMM,
    "workshop/launch": ["runtime/base", *PUBLIC_BASE],
    "workshop/tokenizer": ["runtime/base", "runtime/config", *PUBLIC_BASE],
    "runtime/data": ["runtime/base", *PUBLIC_BASE, *PUBLIC_DATA],
    "sharding/layout": [*GROUND, *PUBLIC_LAYOUT],
    "sharding/compress": [*SUM, "sharding/layout"],
    "sharding/layout/plan": [*GROUND, *PUBLIC_LAYOUT, "sharding/layout", "sharding/compress"],
    "planner/measured": [*INTERFACE, "runtime/comm", "runtime/comm/rounds", *LAYOUT],
    "planner": [*INTERFACE, "runtime/comm", "runtime/comm/rounds", *LAYOUT, "planner/measured", "planner/modes", "planner/script"],
    "planner/modes": [*INTERFACE, "runtime/comm", "runtime/comm/rounds", *LAYOUT, "planner/measured"],
    "planner/script": [*INTERFACE, "runtime/comm", "runtime/comm/rounds", *LAYOUT, "planner/measured"],
    "sharding": [*GROUND, *SHARED, "runtime/border", "runtime/torch", *LAYOUT, *PUBLIC_SHARDING, "include/tessera/error.h"],
    "sharding/gather": [*GROUND, "runtime/base/metrics", *SHARED, "runtime/border", "runtime/torch", *SHARDING, *PUBLIC_SHARDING, "include/tessera/error.h"],
    "sharding/reduce/pack": [*GROUND, "runtime/comm/sum", *SHARDING, *PUBLIC_SHARDING],
    "sharding/reduce": [*GROUND, "runtime/base/metrics", *SHARED, "runtime/border", *REDUCE, *PUBLIC_SHARDING, "include/tessera/error.h"],
    "optim/arithmetic": GROUND,
    "optim/rules": [*GROUND, "optim/arithmetic"],
    "optim/loops": [*GROUND, "optim/arithmetic", "optim/rules"],
    "optim": [*GROUND, "optim/arithmetic", "optim/rules", "optim/loops"],
    "optim/cuda": [*GROUND, *OPTIM, "optim/rules"],
    "offload/files": ["runtime/base", *PUBLIC_BASE, *PUBLIC_OFFLOAD],
    "offload/io": ["runtime/base", "offload/files", *PUBLIC_BASE],
    "offload": ["runtime/base", "offload/files", "offload/io", *PUBLIC_BASE, *PUBLIC_OFFLOAD],
    "checkpoint/files": ["runtime/base", "runtime/config", *OFFLOAD, *PUBLIC_BASE, *PUBLIC_DATA],
    "checkpoint": ["runtime/base", "runtime/config", *OFFLOAD, "checkpoint/files", *PUBLIC_BASE, *PUBLIC_DATA, *PUBLIC_OFFLOAD],
    "include/tessera": [],
    "engine/init": ENGINE_GROUND,
    "engine/device": ENGINE_GROUND,
    "engine/memory/records": [*ENGINE_GROUND, "engine/device"],
    "engine/memory": MEMORY,
    "engine/autograd": [*ENGINE_GROUND],
    "engine/activations": [*ENGINE_GROUND, "engine/autograd", "engine/device"],
    "engine/replay": REPLAY,
    "engine/step/agree": MEMORY,
    "engine/step/rules": [*MEMORY, "engine/step/agree"],
    "engine/step": STEP,
    "engine/step/queued": STEP,
    "engine/asynchronous": STEP,
    "engine/loop": [*ENGINE_GROUND, "engine/autograd", "engine/device"],
    "engine/checkpoint": STEP,
    "engine/weights": [*ENGINE_GROUND, "engine/checkpoint"],
    "engine/job": [*ENGINE_GROUND, "engine/device", "engine/memory"],
    "engine/parameters": [*ENGINE_GROUND, "engine/init", "engine/memory", "engine/checkpoint"],
    "engine/training": [*ENGINE_GROUND, *ENGINE],
    "engine": [*ENGINE_GROUND, *ENGINE],
    "engine/saving": [*ENGINE_GROUND, *ENGINE, "engine"],
    "workshop/models": [*GROUND, *PUBLIC_MODELS],
    "workshop/bench": [*GROUND, "runtime/data", *SHARED, *OPTIM, *OFFLOAD, "sharding/layout", "sharding/layout/plan", *PLANNER, *PUBLIC_LAYOUT],
    "workshop/bench/studies": [*GROUND, "runtime/border", "runtime/comm", "runtime/comm/local", "runtime/data", "sharding/layout", "sharding/layout/plan", "workshop/models",
                                  "workshop/bench", "include/tessera"],
    "workshop/app": [*GROUND, "runtime/border", "runtime/base/metrics", "workshop/launch", "runtime/data", *OFFLOAD, *CHECKPOINT, "workshop/models", "include/tessera"],
    "workshop/app/text": COMMAND,
    "workshop/app/plan": [*COMMAND, "engine/asynchronous"],
    "workshop/app/train": [*COMMAND, "engine/loop", "engine/asynchronous", "workshop/app/plan", "workshop/app/text"],
    "workshop/app/bench": COMMAND,
    "workshop/app/doctor": COMMAND,
    "python": [*GROUND, "runtime/border", "runtime/comm", "engine", "engine/job", "engine/loop", "engine/saving", "sharding/unit.h", "include/tessera"],
    "examples": ["include/tessera", "workshop/models"],
}
FREE_OF_TORCH = ["runtime/base", "runtime/base/metrics", "runtime/config", "runtime/config/keys", "runtime/config/rules", "workshop/launch", "workshop/tokenizer", "runtime/data",
                 "sharding/layout", "sharding/compress", "sharding/layout/plan", *PLANNER, *OPTIM, "optim/rules", "optim/loops", *OFFLOAD, *CHECKPOINT,
                 "runtime/comm/sum", "runtime/comm/local", "runtime/comm/compose", "runtime/comm/rounds", "runtime/comm/shared"]
PUBLIC = "include/tessera"
PUBLIC_FREE_OF_TORCH = ["include/tessera/metrics_file.h", *PUBLIC_CONFIG, *PUBLIC_COMM, *PUBLIC_DATA, *PUBLIC_LAYOUT, *PUBLIC_OFFLOAD, *PUBLIC_MODELS]
SOURCES = (".h", ".cc", ".cu", ".cuh")
# Replaces the folder of headers that LibTorch's wheel lacks.
GLOO_STUBS = "runtime/comm/c10d/gloo_stubs"
TORCH = re.compile(r"^(ATen|c10|torch|caffe2)/")
# If LibTorch's headers are included too, an include of fmt finds LibTorch's own copy.
WITHOUT_FMT = ["engine", "sharding", "python"]
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)
CLASS = re.compile(r"^(?:struct|class) (\w+)(?: final)?(?: : [^{;]*)?\s*\{", re.M)
NAMESPACE = re.compile(r"^namespace (\w+) \{", re.M)


# The room for code that depends on the version of LibTorch.
VERSIONS = "runtime/torch"
VERSION = re.compile(r"\bTORCH_VERSION_(MAJOR|MINOR|PATCH)\b")


def layer_of(path):
    fits = [layer for layer in ALLOWED if path == layer or path.startswith(layer + "/")]
    return max(fits, key=len) if fits else None


def target_of(root, source, name):
    """Returns the file that an include names, relative to the root. Returns None for files of other projects."""
    for base in (root, root / "include", root / GLOO_STUBS, source.parent):
        candidate = (base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def public_complaints(root, source):
    """Yields complaints about the includes of a public header. Users compile against the public headers with only
    LibTorch and the standard library."""
    free_of_torch = source.relative_to(root).as_posix() in PUBLIC_FREE_OF_TORCH
    for bracket, name in INCLUDE.findall(source.read_text(encoding="utf-8")):
        if TORCH.match(name):
            if free_of_torch:
                yield f"includes {name}, but layers below LibTorch include this header"
            continue
        is_std = bracket == "<" and re.fullmatch(r"[a-z_0-9]+", name)
        if not is_std and not (bracket == '"' and name.startswith("tessera/")):
            yield f"includes {name}: a public header includes public headers, LibTorch and the standard library only"
        elif free_of_torch and not is_std and f"include/{name}" not in PUBLIC_FREE_OF_TORCH:
            yield f"includes {name}, which may include LibTorch; layers below it include this header"


def complaints(root, source):
    own = layer_of(source.relative_to(root).as_posix())
    if own != VERSIONS and VERSION.search(source.read_text(encoding="utf-8")):
        yield f"looks at LibTorch's version, which {VERSIONS} alone does"
    for bracket, name in INCLUDE.findall(source.read_text(encoding="utf-8")):
        if TORCH.match(name):
            if own in FREE_OF_TORCH:
                yield f"includes {name}, but {own} is free of LibTorch"
            if name == "torch/torch.h":
                yield "includes torch/torch.h, which costs 25 s a file"
            continue
        if name.startswith("fmt/") and own and own not in FREE_OF_TORCH and own.split("/")[0] in WITHOUT_FMT:
            yield f"includes {name}, and LibTorch's headers bring another version of it that nothing defines. hint: c10::str"
        target = target_of(root, source, name)
        if target is None:
            if bracket == '"':
                yield f'includes "{name}", which is no file of this project'
            continue
        if bracket == "<" and own != "examples":  # an example includes headers as a user's program does
            yield f'includes <{name}>, a header of this project: write "{name}"'
        layer = layer_of(target)
        if layer != own and target not in ALLOWED[own] and layer not in ALLOWED[own]:
            yield f"includes {name}: {own} may not see {layer}"


def sources_of(root, layer):
    for source in sorted((root / layer).rglob("*")):
        if source.suffix in SOURCES and layer_of(source.relative_to(root).as_posix()) == layer:
            yield source


def twice_named(root, sources):
    """Finds classes that two headers define under one name. A linker would use the functions of one class for both."""
    first = {}
    for source in sources:
        text = source.read_text(encoding="utf-8") if source.suffix == ".h" else ""
        for name in CLASS.findall(text):
            other = first.setdefault((*NAMESPACE.findall(text), name), source)
            if other != source:
                yield f"{source.relative_to(root)}: defines {name}, which {other.relative_to(root)} defines too"


def main(root):
    root = pathlib.Path(root).resolve()
    found, seen = list(twice_named(root, (source for layer in ALLOWED for source in sources_of(root, layer)))), 0
    for layer in ALLOWED:
        for source in sources_of(root, layer):
            seen += 1
            found += [f"{source.relative_to(root)}: {text}" for text in complaints(root, source)]
            if layer == PUBLIC:
                found += [f"{source.relative_to(root)}: {text}" for text in public_complaints(root, source)]
    print("\n".join(found) or f"{seen} files keep to their layers")
    return 1 if found or seen < 50 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
