"""What a hostile case is: the place that is hostile, how it is, the command that meets it, and what must come of that."""

import dataclasses
from typing import Callable, Optional

USAGE, CORRUPT, MISSING, UNAVAILABLE, RESOURCE, CREATE, IO, PEER, DENIED, CONFIG = 64, 65, 66, 69, 71, 73, 74, 75, 77, 78
MIB = 1 << 20


@dataclasses.dataclass
class Case:
    """One process of a command; with `ranks`, one of each rank of a job.

    It runs in the folder `inside`, which holds what seeds.py makes and `prepare` changes. Beside it lies the folder `outside`, with
    copies of the same files: links lead there. Nothing there may be opened or changed.
    """
    group: str  # files, links, limits or network
    place: str  # the file, the port or the limit that is hostile
    what: str  # how it is
    kind: str  # the family of `what`, which the sample goes by
    words: list  # of the command line, without the program
    codes: tuple  # exit codes that are right
    prepare: Optional[Callable] = None  # gets the folder
    names: tuple = ()  # an error names one of these
    writes: tuple = ()  # patterns of files that may be there afterwards and were not before, or be others
    opens_outside: bool = False  # what lies there may be opened, and not changed: a link on the command line is the user's own word
    environment: dict = dataclasses.field(default_factory=dict)
    limits: dict = dataclasses.field(default_factory=dict)  # of the process: names of machine.LIMITS
    disk: int = 0  # bytes of a file system of its own that is mounted at inside/disk; 0: none
    as_nobody: bool = False  # without root's privileges, which limits and permissions do not bind
    stdout: str = ""  # a file in place of the pipe
    ranks: int = 0  # of a job with a port for its store; 0: a process alone
    only: tuple = ()  # ranks that come; empty: all
    stranger: Optional[Callable] = None  # runs beside the ranks, in a process of its own: stranger(Job)
    late: tuple = ()  # ranks that wait until the stranger has said Job.go_on()
    at_rest: float = 20  # seconds on a machine at rest, after which it hangs
    says: int = 20_000  # bytes that it says at most
    memory: int = 256 * MIB  # that its peak may lie above a command's that does nothing
    exec: bool = False  # the program `tessera` itself, and what it finds beside itself

    @property
    def name(self):
        return f"{self.group}: {self.place}: {self.what}: {self.command}"

    @property
    def command(self):
        return " ".join(self.words[:2]) if self.words[:1] == ["checkpoint"] else self.words[0]
