"""Checks that every C++ and CUDA source is formatted as clang-format would format it. To repair a source, run
clang-format -i FILE...

Usage: check_format.py ROOT CLANG_FORMAT
"""

import concurrent.futures
import pathlib
import subprocess
import sys

FOLDERS = ["benchmarks", "checkpoint", "engine", "examples", "include", "offload", "optim", "planner", "python", "runtime", "sharding",
           "tests", "workshop"]
# Declarations that replace another project's headers, where the order of includes matters.
EXCEPT = ["runtime/comm/c10d/gloo_stubs", "runtime/comm/c10d/gloo_transport.cc", "tests/support/stand_ins/cuda_on_host.h"]


def main(root, clang_format):
    root = pathlib.Path(root)
    sources = [source for folder in FOLDERS for source in sorted((root / folder).rglob("*"))
               if source.suffix in (".h", ".cc", ".cu", ".cuh")
               and not any(part.startswith(".") for part in source.relative_to(root).parts)  # such as benchmarks/.venv
               and not any(source.relative_to(root).as_posix().startswith(name) for name in EXCEPT)]

    def check(files):
        return subprocess.run([clang_format, "--dry-run", "--Werror", *files], capture_output=True, text=True)

    # Each of two processes gets every second file, so that both have about the same work.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(check, (sources[::2], sources[1::2])))
    print("".join(result.stderr for result in results) or f"{len(sources)} files are as .clang-format says")
    return max(abs(result.returncode) for result in results) or (1 if len(sources) < 50 else 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
