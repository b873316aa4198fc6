"""Whether the LibTorch in this process is the one that the extension module was built with."""

import pathlib

import torch


def expect_same_torch() -> None:
    """Raises ImportError unless torch has the version of the build. C++ classes differ between versions, silently."""
    from tessera import _built_with

    if torch.__version__ == _built_with.TORCH_VERSION:
        return
    raise ImportError(
        f"tessera was built with torch {_built_with.TORCH_VERSION}, but this Python has torch {torch.__version__} "
        f"({pathlib.Path(torch.__file__).parent}). Install tessera again beside this torch (pip install "
        f"--force-reinstall --no-deps ./python), or install torch=={_built_with.TORCH_VERSION}.")


def expect_one_torch() -> None:
    """Raises ImportError if two LibTorches are loaded, which have two of each registry and allocator."""
    found = {line.split(maxsplit=5)[5].strip() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
             if line.endswith("/libtorch_cpu.so")}
    if len(found) > 1:
        raise ImportError(f"two LibTorches are in this process: {', '.join(sorted(found))}. Is LD_PRELOAD or LD_LIBRARY_PATH set?")
