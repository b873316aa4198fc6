"""`python -m tessera.cmake_path` prints the CMAKE_PREFIX_PATH that find_package(Tessera) needs."""

import pathlib
import sys


def cmake_path() -> str:
    """Returns the folder under which the library, its headers and the CMake package lie."""
    return str(pathlib.Path(__file__).absolute().parent)


def main() -> None:
    prefix = cmake_path()
    if not (pathlib.Path(prefix) / "lib/cmake/Tessera/TesseraConfig.cmake").is_file():
        sys.exit(f"{prefix} is a package of a build, without the C++ library: cmake --install BUILD --prefix PREFIX, and use PREFIX")
    print(prefix)


if __name__ == "__main__":
    main()
