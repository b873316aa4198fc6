"""Gives the text on which the models of the learning studies are trained: LibTorch's header files, since every machine
with LibTorch has them. It uses the standard library only."""

import importlib.util
import pathlib
import sys


def include_folder():
    """Returns the folder of the headers of this Python's torch. Raises SystemExit if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        program = pathlib.Path(sys.argv[0]).name
        sys.exit(f"{program}: this Python has no torch, whose headers are the data. hint: .venv/bin/python")
    return pathlib.Path(spec.submodule_search_locations[0]) / "include"


def make_data(folder):
    """Returns (path of the training data, path of the held-out data): the folder of the headers in ATen/, and one file
    in `folder` with the headers in c10/."""
    include, held_out = include_folder(), folder / "held_out.h"
    headers = sorted((include / "c10").rglob("*.h"), key=lambda path: str(path).encode())
    held_out.write_bytes(b"".join(path.read_bytes() for path in headers))
    return include / "ATen", held_out
