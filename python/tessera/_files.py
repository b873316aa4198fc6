"""Has the functions that the commands share: for arguments, and for writing files completely or not at all."""

import argparse
import errno
import os
import stat
import sys
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from tessera._error import Error

USAGE, CORRUPT, MISSING, CANNOT_CREATE, IO, DENIED = 64, 65, 66, 73, 74, 77


class Parser(argparse.ArgumentParser):
    """A parser that ends the program with exit code 64 if the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}. [T0673] hint: --help lists the options\n")


def exit_code_after(command: Callable[[], None]) -> int:
    """Runs a command, and returns its exit code. The text of an Error goes to stderr."""
    try:
        command()
    except Error as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def code_of(error: OSError, without_place: int) -> int:
    """Returns the exit code for an error of the system. `without_place`: the code if no file can have this path, for
    example if the folder does not exist."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return DENIED
    return without_place if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP) else IO


def expect_free(out: str, what: str, inputs: list[str], overwrite: bool) -> None:
    """Checks, before any work, that no file would be destroyed by mistake. `what` is the name that the inputs have in
    an error."""
    if os.path.lexists(out) and not os.path.islink(out):
        for name in inputs:
            if os.path.exists(name) and os.path.samefile(out, name):
                raise Error(f"--out {out} and {what} {name} are the same file, which would be replaced. "
                            "[T0675] hint: give --out another name", USAGE)
    if os.path.lexists(out) and (os.path.islink(out) or not os.path.isfile(out)):
        raise Error(f"--out {out} is a link, a directory or a device. [T0676] hint: name a file that may be created", CANNOT_CREATE)
    if os.path.lexists(out) and not overwrite:
        raise Error(f"--out {out} exists already, and is kept. [T0677] hint: --overwrite replaces it; another name keeps both", CANNOT_CREATE)


def _create(partial: str) -> BinaryIO:
    """Creates a file. A file of this name that a killed program has left is replaced."""
    try:
        return open(partial, "xb")
    except FileExistsError:
        if not stat.S_ISREG(os.lstat(partial).st_mode):
            raise
        os.unlink(partial)
        return open(partial, "xb")


def write_whole(out: str, text: str) -> None:
    """Writes the whole file or nothing: the file gets its name only when it is on the disk."""
    partial = f"{out}.partial"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        with _create(partial) as file:
            try:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, out)
            except OSError:
                os.unlink(partial)
                raise
    except OSError as error:
        raise Error(f"--out {out} cannot be written: {error.strerror} ({error.filename or partial}). "
                    "[T0678] hint: name a place that may be written and has "
                    "room", code_of(error, CANNOT_CREATE)) from error


def print_all(text: str, way_out: str = "; --out writes a file") -> None:
    """Prints a text, and raises an error if the text could not be written. The error's hint ends with `way_out`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's last flush then goes to /dev/null
        raise Error(f"standard output could not be written: {error.strerror}. [T0679] hint: what was printed is not complete{way_out}", IO) from error
