"""The command `tessera` of an installed package: it starts tessera/bin/tessera, and imports neither the package nor
torch. Commands that are modules of the package run in this Python.
"""

import importlib.util
import os
import pathlib
import sys

_MODULES = {"import-config": "tessera.import_config", "report": "tessera.report"}


def main() -> None:
    if module := _MODULES.get(sys.argv[1] if len(sys.argv) > 1 else ""):
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[2:]])
    found = importlib.util.find_spec("tessera")
    for folder in found.submodule_search_locations or [] if found else []:
        program = pathlib.Path(folder) / "bin" / "tessera"
        if program.is_file():
            _find_libraries_of_torch(pathlib.Path(folder))
            os.execv(program, ["tessera", *sys.argv[1:]])
    sys.exit("tessera: the package tessera that Python finds has no bin/tessera. Install it again: pip install --force-reinstall "
             "--no-deps tessera_train")


def _find_libraries_of_torch(package: pathlib.Path) -> None:
    """Tells programs where to find LibTorch. Programs look for a torch package beside this package, but torch may be
    elsewhere."""
    if (package.parent / "torch").is_dir():
        return
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return
    site = pathlib.Path(torch.submodule_search_locations[0]).parent
    folders = [site / "torch" / "lib", *sorted(site.glob("nvidia/cu*/lib")), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in folders if folder)
