"""Defines a hostile case: the hostile place, the way in which it is hostile, the command that meets it, and the required result."""

import dataclasses
from typing import Callable, Optional

USAGE, CORRUPT, MISSING, UNAVAILABLE, RESOURCE, CREATE, IO, PEER, DENIED, CONFIG = 64, 65, 66, 69, 71, 73, 74, 75, 77, 78
MIB = 1 << 20


@dataclasses.dataclass
class Case:
    """One process of a command. If `ranks` is not 0, there is one process for each rank of a job.

    Each process runs in the folder `inside`, with the files that seeds.py makes and the changes that `prepare` makes.
    The folder `outside` lies beside it, with copies of the same files. Links point to these copies. No process may open
    or change anything in `outside`.
    """
    group: str  # files, links, limits or network
    place: str  # the file, the port or the limit that is hostile
    what: str  # the way in which the place is hostile
    kind: str  # the family of `what`, from which the sample is drawn
    words: list  # words of the command line, without the program
    codes: tuple  # exit codes that are right
    prepare: Optional[Callable] = None  # a function that is called with the folder
    names: tuple = ()  # the error must name one of these
    writes: tuple = ()  # patterns of files that the command may make or change
    opens_outside: bool = False  # files outside may be opened but not changed, since the user named the link
    environment: dict = dataclasses.field(default_factory=dict)
    limits: dict = dataclasses.field(default_factory=dict)  # limits of the process, by names of machine.LIMITS
    disk: int = 0  # bytes of a separate file system that is mounted at inside/disk; 0: none
    as_nobody: bool = False  # the case runs without root's rights, since limits and permissions do not bind root
    stdout: str = ""  # a file that gets stdout; empty: a pipe gets it
    ranks: int = 0  # number of ranks of a job with a store; 0: a single process
    only: tuple = ()  # ranks that are started; empty: all
    stranger: Optional[Callable] = None  # a function that runs beside the ranks, in its own process: stranger(Job)
    late: tuple = ()  # ranks that wait until the stranger has called Job.go_on()
    at_rest: float = 20  # seconds on an idle machine after which the case counts as hanging
    says: int = 20_000  # largest number of bytes that the command may print
    memory: int = 256 * MIB  # bytes by which the peak of memory may exceed that of a command that does nothing
    exec: bool = False  # the case runs the program `tessera` itself, which finds other programs beside it

    @property
    def name(self):
        return f"{self.group}: {self.place}: {self.what}: {self.command}"

    @property
    def command(self):
        return " ".join(self.words[:2]) if self.words[:1] == ["checkpoint"] else self.words[0]
