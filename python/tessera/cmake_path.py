"""`python -m tessera.cmake_path` prints the CMAKE_PREFIX_PATH that find_package(Tessera) needs."""

import pathlib
import sys

from tessera._error import Error
from tessera._files import MISSING, exit_code_after, print_all


def cmake_path() -> str:
    """Returns the folder under which the library, its headers and the CMake package lie."""
    return str(pathlib.Path(__file__).absolute().parent)


def _print() -> None:
    prefix = cmake_path()
    if not (pathlib.Path(prefix) / "lib/cmake/Tessera/TesseraConfig.cmake").is_file():
        raise Error(f"{prefix} is a package of a build, without the C++ library. [T1094] hint: cmake --install BUILD --prefix PREFIX, and use PREFIX", MISSING)
    print_all(prefix + "\n", "")


def main() -> int:
    """Runs the command and returns its exit code."""
    return exit_code_after(_print)


if __name__ == "__main__":
    sys.exit(main())
