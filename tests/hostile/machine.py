"""Runs cases, several at a time, and reports what is bad about each result.

This process has one thread, and forks one process for each rank of a case. The commands are a shared library that this
process has loaded, so LibTorch is started only once. A case's process gets its folder, limits, user and environment,
calls the command as its `main` would call it, and ends.
"""

import ctypes
import dataclasses
import errno
import fnmatch
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import struct
import sys
import time

from case import MIB

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from free_port import free_port  # noqa: E402
from patience import measure_reference, patient, REFERENCE_AT_REST  # noqa: E402

NOBODY = 65534
PROTECTION = 4 << 30  # bytes of address space beyond those at a process's start, so no case takes all of the memory
# The names of Case.limits. The limit of address space is counted from the amount that the process has at its start.
LIMITS = {"descriptors": resource.RLIMIT_NOFILE, "file size": resource.RLIMIT_FSIZE, "processes": resource.RLIMIT_NPROC,
          "locked memory": resource.RLIMIT_MEMLOCK, "address space": resource.RLIMIT_AS}
# Variables that a launcher, or a test around this one, may have set.
LEFT_OUT = re.compile(r"RANK|WORLD_SIZE|MASTER_|SLURM_|OMPI_|PMI|MV2_|TESSERA_|TORCHELASTIC_")
ERROR_LINE = re.compile(r"^(?:\[rank \d+\] )?\d\d:\d\d:\d\d\.\d+ error ", re.MULTILINE)
# Lines that LibTorch logs about connections of its store, with stack traces. They are allowed, since Tessera does not
# write them.
OF_LIBTORCH = re.compile(r"^(\[[EWI]\d{4} |Exception raised from |frame #).*$", re.MULTILINE)
INTERNAL = re.compile(r"internal error|Exception raised from|terminate called|\bstd::|miniz error|AddressSanitizer")

libc = ctypes.CDLL(None, use_errno=True)


class Commands:
    """The shared library that holds the commands."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.tessera_command.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def run_and_exit(self, words):
        arguments = [os.fsencode(word) for word in ["tessera", *words]]
        argv = (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)
        code = self.library.tessera_command(len(arguments), argv)
        libc.fflush(None)
        os._exit(code)  # a normal exit of LibTorch would take longer than the command


class Watch:
    """Watches a folder and its files for openings and changes."""

    SEEN = {0x1: "read", 0x2: "changed", 0x20: "opened", 0x100: "made", 0x200: "removed", 0x40: "moved", 0x80: "moved"}
    IGNORED, IS_FOLDER, CHANGES = 0x8000, 0x40000000, 0x3C2

    def __init__(self, folder):
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self.fd >= 0, "inotify_init1"
        self.names = {}
        for path in [folder, *folder.rglob("*")]:
            if path.is_symlink():
                continue
            watch = libc.inotify_add_watch(self.fd, os.fsencode(path), sum(self.SEEN))
            assert watch >= 0, f"inotify_add_watch {path}"
            self.names[watch] = path

    def seen(self, may_be_opened):
        """Ends the watch and returns one text for each forbidden event."""
        found = set()
        wrong = self.CHANGES if may_be_opened else sum(self.SEEN)
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                watch, mask, _, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16:at + 16 + length].rstrip(b"\0").decode(errors="replace")
                at += 16 + length
                if may_be_opened and name.startswith("#"):
                    continue  # a file without a name, of a command whose folder is a link that the user gave
                if mask & (self.CHANGES if mask & self.IS_FOLDER else wrong) and not mask & self.IGNORED:  # folders may be looked at
                    found.add(f"{self.names[watch] / name}: " + ", ".join(text for bit, text in self.SEEN.items() if mask & bit))
        os.close(self.fd)
        return sorted(found)


@dataclasses.dataclass
class Job:
    """The facts that a stranger knows about the job that it attacks."""
    folder: pathlib.Path
    port: int  # port of the store
    pids: list

    def go_on(self):
        (self.folder.parent / "go-on").touch()

    def listening(self, rank):
        """Returns the ports at which a rank listens."""
        inodes = set()
        try:
            for link in pathlib.Path(f"/proc/{self.pids[rank]}/fd").iterdir():
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            return []
        ports = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    ports.append(int(words[1].rpartition(":")[2], 16))
        return sorted(set(ports))


@dataclasses.dataclass
class End:
    code: int  # exit code, or -signal
    text: str = ""  # stdout and stderr
    said: int = 0  # bytes of output so far
    peak: int = 0  # bytes
    cpu: float = 0  # seconds


class Process:
    """A forked process. Its output goes through a pipe, since a limit of file sizes would otherwise cut it."""

    def __init__(self, body, stdout=""):
        self.reads, writes = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(body, writes, stdout)
        os.close(writes)
        os.set_blocking(self.reads, False)
        self.data, self.said, self.end = b"", 0, None

    def look(self):
        """Reads the output so far. Returns True when the process and its output have ended."""
        while self.reads >= 0:
            try:
                data = os.read(self.reads, 65536)
            except BlockingIOError:
                break
            if not data:
                os.close(self.reads)
                self.reads = -1
            self.said += len(data)
            self.data = (self.data + data)[-100_000:]
        if self.end is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid == self.pid:
                self.end = End(os.waitstatus_to_exitcode(status), peak=usage.ru_maxrss * 1024, cpu=usage.ru_utime + usage.ru_stime)
        if self.end is None or self.reads >= 0:
            return False
        self.end.text, self.end.said = self.data.decode(errors="replace"), self.said
        return True

    def kill(self):
        for kill in (lambda: os.killpg(self.pid, signal.SIGKILL), lambda: os.kill(self.pid, signal.SIGKILL)):
            try:
                kill()
            except ProcessLookupError:
                pass


def _become(body, writes, stdout):
    """Runs in the forked process. It makes a session, resets signals, and calls `body`, which does not return."""
    try:
        os.setsid()
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python's handlers must not reach the command
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open("/dev/null", os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(os.open(stdout, os.O_WRONLY) if stdout else writes, 1)
        os.dup2(writes, 2)
        os.closerange(3, 4096)
        body()
    except BaseException as error:
        os.write(2, f"the test's own process failed: {error!r}\n".encode())
    finally:
        os._exit(199)


def listing(folder):
    """Returns {path below the folder: a value that changes if the path changes}."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
    return found


class Running:
    """A case that is running."""

    def __init__(self, case, commands, tessera, seeds, folder):
        self.case, self.commands, self.tessera = case, commands, tessera
        self.folder = folder / "inside"
        shutil.copytree(seeds, self.folder, symlinks=True)
        shutil.copytree(seeds, folder / "outside", symlinks=True)
        if case.prepare:
            case.prepare(self.folder)
        for path in (folder, self.folder):
            path.chmod(0o777)
        if case.as_nobody:
            for path in self.folder.rglob("*"):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        self.before = listing(self.folder)
        self.watch = Watch(folder / "outside")
        self.port = free_port() if case.ranks else 0
        self.begun = time.monotonic()
        self.limit = patient(case.at_rest)
        ranks = case.only or range(max(case.ranks, 1))
        self.processes = [Process(lambda rank=rank: self.become_rank(rank), case.stdout) for rank in ranks]
        self.stranger = None
        if case.stranger:
            job = Job(self.folder, self.port, [process.pid for process in self.processes])
            self.stranger = Process(lambda: (signal.signal(signal.SIGPIPE, signal.SIG_IGN), case.stranger(job), os._exit(0)))
        self.hung = False

    def become_rank(self, rank):
        case = self.case
        for name in [name for name in os.environ if LEFT_OUT.search(name)]:
            del os.environ[name]
        os.environ.update({"TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", **case.environment})
        if case.ranks:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_WORLD_SIZE=str(case.ranks),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        os.chdir(self.folder)
        if case.disk:
            _mount_at("disk", case.disk)
        while rank in case.late and not (self.folder.parent / "go-on").exists():
            time.sleep(0.02)
        limits = {"address space": PROTECTION, **case.limits}
        for name, value in limits.items():
            value += _address_space() if name == "address space" else 0
            if name == "processes":
                continue
            resource.setrlimit(LIMITS[name], (value, value))
        if case.as_nobody:
            if "processes" in limits:
                resource.setrlimit(LIMITS["processes"], (limits["processes"],) * 2)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        if case.exec:
            os.execv(self.tessera, [self.tessera, *case.words])
        self.commands.run_and_exit(case.words)

    def look(self):
        """Returns True when all processes have ended."""
        ended = all([process.look() for process in self.processes])
        if ended or time.monotonic() - self.begun < self.limit:
            return ended
        # A longer limit shows whether this machine was slow, or the case hangs.
        self.limit = max(self.limit, self.case.at_rest * measure_reference() / REFERENCE_AT_REST)
        if time.monotonic() - self.begun < self.limit:
            return False
        self.hung = True
        for process in self.processes:
            if process.end is None:
                process.kill()
        return False

    def stop_stranger(self):
        if self.stranger:
            self.stranger.kill()
            while self.stranger.end is None:
                self.stranger.look()
                time.sleep(0.001)

    def bad(self, least):
        """Returns one text for each thing that is bad about the case. `least`: the peak of a command that does nothing."""
        case, found = self.case, []
        if self.hung:
            found.append(f"hung for {self.limit:.0f} s")
        for rank, process in enumerate(self.processes):
            found += [f"rank {rank}: {text}" if case.ranks else text for text in self.bad_end(process.end, least)]
        if case.ranks and 0 not in case.codes and not any(named(case, process.end.text) for process in self.processes):
            found.append(f"no rank names {' or '.join(case.names)}")
        found += [f"outside: {text}" for text in self.watch.seen(case.opens_outside)]
        after = listing(self.folder)
        for path in sorted({*self.before, *after}):
            if self.before.get(path) == after.get(path) or any(fnmatch.fnmatch(path, pattern) for pattern in case.writes):
                continue
            if path not in self.before or path not in after:
                found.append(f"{'left' if path not in self.before else 'removed'} {path}")
            elif not pathlib.Path(self.folder, path).is_dir():
                found.append(f"changed {path}")
        return found

    def bad_end(self, end, least):
        case, found = self.case, []
        if end.code < 0 and not self.hung:
            found.append(f"ended by signal {-end.code} ({signal.Signals(-end.code).name})")
        elif end.code not in case.codes and not self.hung:
            found.append(f"ended with {end.code}, want {' or '.join(map(str, case.codes))}")
        if end.said > case.says:
            found.append(f"says {end.said} bytes")
        if inside := INTERNAL.search(OF_LIBTORCH.sub("", end.text)):
            found.append(f"shows its inside: {inside[0]!r}")
        if end.peak - least > case.memory:
            found.append(f"took {(end.peak - least) / MIB:.0f} MiB, may take {case.memory / MIB:.0f}")
        if any(line.count("hint:") > 1 for line in end.text.splitlines()):
            found.append("has two hints in one line")
        if end.code > 0:
            if len(ERROR_LINE.findall(end.text)) > 1:
                found.append("says more than one error")
            if "hint:" not in end.text and "--help" not in end.text:
                found.append("has no hint")
            if not case.ranks and not named(case, end.text):
                found.append(f"does not name {' or '.join(case.names)}")
        return found


def named(case, text):
    return not case.names or any(name in text for name in case.names)


def _address_space():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _mount_at(name, size):
    """Mounts a small file system that only this process sees."""
    CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) or \
            libc.mount(b"none", name.encode(), b"tmpfs", 0, f"size={size},mode=777".encode()):
        raise OSError(ctypes.get_errno(), "mount")


def can_mount():
    pid = os.fork()
    if pid == 0:
        try:
            os.mkdir(f"/tmp/tessera-mount-{os.getpid()}")
            _mount_at(f"/tmp/tessera-mount-{os.getpid()}", 4096)
        except OSError:
            os._exit(1)
        os._exit(0)
    can = os.waitpid(pid, 0)[1] == 0
    try:
        os.rmdir(f"/tmp/tessera-mount-{pid}")
    except OSError as error:
        assert error.errno == errno.ENOENT, error
    return can


def remove(folder):
    for locked in folder.rglob("*"):
        if locked.is_dir() and not locked.is_symlink():
            locked.chmod(0o755)
    shutil.rmtree(folder)


def run_all(cases, commands, tessera, seeds, work, at_once, least):
    """Yields (case, list of everything that is bad, Running) when a case ends."""
    waiting, running, number = list(reversed(cases)), [], 0
    while waiting or running:
        while waiting and len(running) < at_once:
            folder = work / f"case-{number}"
            number += 1
            folder.mkdir()
            running.append(Running(waiting.pop(), commands, tessera, seeds, folder))
        select.select([process.reads for each in running for process in each.processes if process.reads >= 0], [], [], 0.01)
        for each in [each for each in running if each.look()]:
            running.remove(each)
            each.stop_stranger()
            yield each.case, each.bad(least), each
            remove(each.folder.parent)
