"""Computes the wheel's version and dependency, which follow from the torch with which the wheel is built.

scikit-build-core calls `dynamic_metadata`.
"""

import os
import pathlib
import re
import sysconfig

FOLDER = pathlib.Path(__file__).absolute().parent


def dynamic_metadata(settings: object, project: object) -> dict[str, object]:
    major, minor = torch_version()
    return {"version": f"{tessera_version()}+pt{major}{minor}", "dependencies": [f"torch>={major}.{minor},<{major}.{minor + 1}"]}


def tessera_version() -> str:
    return re.search(r"^project\(Tessera VERSION ([0-9.]+)", (FOLDER.parent / "CMakeLists.txt").read_text(), re.MULTILINE)[1]


def torch_version() -> tuple[int, int]:
    """Returns (major, minor) of the torch that the build uses. CMake finds this torch in the same place.

    Pip builds in a separate environment, where torch cannot be imported. But torch lies in the folder into which the
    wheel will be installed.
    """
    folder = pathlib.Path(os.environ.get("TESSERA_TORCH_ROOT") or pathlib.Path(sysconfig.get_path("platlib")) / "torch")
    if not (folder / "version.py").is_file():
        raise SystemExit(f"No torch in {folder}. [T0641] hint: install torch into this environment first, or set TESSERA_TORCH_ROOT to its folder")
    found = re.search(r"^__version__[^=]*= *['\"](\d+)\.(\d+)", (folder / "version.py").read_text(), re.MULTILINE)
    return int(found[1]), int(found[2])
