"""No layer includes upwards, and the layers below LibTorch include none of it.

Usage: check_layers.py ROOT
"""

import pathlib
import re
import sys

# Folder -> folders whose headers it may include (besides its own), as in docs/design.md. The longest prefix counts.
ALLOWED = {
    "runtime/base": [],
    "runtime/comm": ["runtime/base"],
    "runtime/launch": ["runtime/base"],
    "runtime/data": ["runtime/base"],
    "sharding/layout": ["runtime/base"],
    "sharding": ["runtime/base", "runtime/comm", "sharding/layout", "include/tessera/error.h"],
    "optim": ["runtime/base"],
    "include/tessera": ["runtime/base", "runtime/comm", "runtime/data", "sharding/layout"],
    "runtime/engine": ["runtime/base", "runtime/comm", "runtime/data", "sharding", "sharding/layout", "optim", "include/tessera"],
    "models": ["runtime/base"],
    "app": ["runtime/base", "runtime/comm", "runtime/launch", "runtime/data", "runtime/engine", "sharding/layout", "optim", "models",
            "include/tessera"],
    "examples": ["include/tessera", "models", "runtime/base", "runtime/data"],
}
FREE_OF_TORCH = ["runtime/base", "runtime/launch", "runtime/data", "sharding/layout", "optim"]
TORCH = re.compile(r"^(ATen|c10|torch|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def layer_of(path):
    fits = [layer for layer in ALLOWED if path == layer or path.startswith(layer + "/")]
    return max(fits, key=len) if fits else None


def target_of(root, source, quoted):
    """The file that an include names, relative to the root; None for what is not ours."""
    for base in (root, root / "include", source.parent):
        candidate = (base / quoted).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def complaints(root, source):
    own = layer_of(source.relative_to(root).as_posix())
    for kind, name in INCLUDE.findall(source.read_text(encoding="utf-8")):
        if TORCH.match(name):
            if own in FREE_OF_TORCH:
                yield f"includes {name}, but {own} is free of LibTorch"
            if name == "torch/torch.h":
                yield "includes torch/torch.h, which costs 25 s a file"
        elif kind == '"':
            target = target_of(root, source, name)
            layer = layer_of(target) if target else None
            if layer in (None, own) or any(target == a or layer == a for a in ALLOWED[own]):
                continue
            yield f"includes {name}: {own} may not see {layer}"


def main(root):
    root = pathlib.Path(root).resolve()
    found, seen = [], 0
    for layer in ALLOWED:
        for source in sorted((root / layer).rglob("*")):
            if source.suffix in (".h", ".cc", ".cu") and layer_of(source.relative_to(root).as_posix()) == layer:
                seen += 1
                found += [f"{source.relative_to(root)}: {text}" for text in complaints(root, source)]
    print("\n".join(found) or f"{seen} files keep to their layers")
    return 1 if found or seen < 50 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
