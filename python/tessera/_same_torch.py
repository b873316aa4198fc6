"""Checks that the extension module works with the LibTorch in this process."""

import pathlib
import sys

import torch


def expect_same_torch() -> None:
    """Raises ImportError unless torch has the build's minor version and CUDA.

    C++ classes differ between minor versions, and no other check would notice the difference.
    """
    from tessera import _built_with

    major, minor = _numbers(_built_with.TORCH_VERSION)
    cuda = _built_with.CUDA_MAJOR
    if _numbers(torch.__version__) == (major, minor) and cuda in ("", (torch.version.cuda or "").partition(".")[0]):
        return
    of_cuda = f" for CUDA {cuda}" if cuda else ""
    raise ImportError(
        f"this tessera was built with torch {_built_with.TORCH_VERSION} and works with every torch {major}.{minor}{of_cuda}, but this "
        f"Python has torch {torch.__version__} ({pathlib.Path(torch.__file__).parent}). [T0665] hint: install a torch that fits (pip install "
        f"'torch>={major}.{minor},<{major}.{minor + 1}'), or make the wheel for this torch in Tessera's sources: scripts/wheel --python "
        f"{sys.executable}, then pip install --force-reinstall --no-deps dist/tessera_train-*.whl")


def expect_one_torch() -> None:
    """Raises ImportError if two LibTorches are loaded, since each would have its own registries and allocators."""
    found = {line.split(maxsplit=5)[5].strip() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
             if line.endswith("/libtorch_cpu.so")}
    if len(found) > 1:
        raise ImportError(f"two LibTorches are in this process: {', '.join(sorted(found))}. [T0666] hint: unset LD_PRELOAD and LD_LIBRARY_PATH")


def _numbers(version: str) -> tuple[int, int]:
    """Returns the numbers of a version: (2, 15) for "2.15.0+cu132"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
