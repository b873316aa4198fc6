"""Every C++ and CUDA source is as clang-format would leave it. Mend with: clang-format -i FILE...

Usage: check_format.py ROOT CLANG_FORMAT
"""

import pathlib
import subprocess
import sys

FOLDERS = ["app", "benchmarks", "checkpoint", "engine", "examples", "include", "models", "offload", "optim", "python", "runtime", "sharding",
           "tests"]
# Declarations that stand in for another project's headers, where the order of includes matters.
EXCEPT = ["runtime/comm/c10d/gloo_stubs", "runtime/comm/c10d/gloo_transport.cc", "tests/support/cuda_on_host.h"]


def main(root, clang_format):
    root = pathlib.Path(root)
    sources = [source for folder in FOLDERS for source in sorted((root / folder).rglob("*"))
               if source.suffix in (".h", ".cc", ".cu", ".cuh")
               and not any(part.startswith(".") for part in source.relative_to(root).parts)  # benchmarks/.venv
               and not any(source.relative_to(root).as_posix().startswith(name) for name in EXCEPT)]
    result = subprocess.run([clang_format, "--dry-run", "--Werror", *sources], capture_output=True, text=True)
    print(result.stderr or f"{len(sources)} files are as .clang-format says")
    return result.returncode or (1 if len(sources) < 50 else 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
