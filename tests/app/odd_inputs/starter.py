"""Starts commands of tessera-train. A process that has loaded them as a library is forked for each command, since
LibTorch's start takes longer than most commands."""

import ctypes
import json
import os
import signal
import socket
import struct
import tempfile
import threading

NUMBER = struct.Struct("i")  # a process's id, and then how the process ended
PR_SET_PDEATHSIG = 1


class Starter:
    """A Starter must be made before this process has threads. Any thread may call `run` afterwards."""

    def __init__(self, library):
        self.requests, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lock = threading.Lock()
        if os.fork() == 0:
            self.requests.close()
            _serve(library, served)
        served.close()

    def run(self, words, folder, environment, user, limit):
        """Returns (exit code or -signal, stdout, stderr). The code is None if the command did not end within `limit` seconds."""
        request = json.dumps([words, str(folder), environment, user]).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            answers, told = socket.socketpair()
            with answers:
                with told, self.lock:
                    socket.send_fds(self.requests, [request], [out.fileno(), err.fileno(), told.fileno()])
                answers.settimeout(limit)
                pid, code = _number(answers), None
                try:
                    code = _number(answers)
                except TimeoutError:
                    os.killpg(pid, signal.SIGKILL)
            for file in (out, err):
                file.seek(0)
            return code, out.read().decode(errors="replace"), err.read().decode(errors="replace")


def _number(answers):
    return NUMBER.unpack(answers.recv(NUMBER.size, socket.MSG_WAITALL))[0]


def _end_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(library, requests):
    """Forks a process for each request. The forked process starts the command and reports how the command ended. This
    loop ends with the process that sends the requests."""
    try:
        _end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.environ["OMP_NUM_THREADS"] = "1"  # the value for every row; OpenMP reads it when it is loaded
        commands = ctypes.CDLL(str(library))
        commands.tessera_command.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        while True:
            request, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not request:
                break
            if os.fork() == 0:
                _watch(commands, json.loads(request), *files)
            for file in files:
                os.close(file)
    finally:
        os._exit(1)


def _watch(commands, request, out, err, told):
    try:
        _end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            _become(commands, request, out, err)
        os.write(told, NUMBER.pack(pid))
        os.write(told, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    finally:
        os._exit(0)


def _become(commands, request, out, err):
    """Runs in the forked process, and turns it into the command."""
    words, folder, environment, user = request
    code = 199
    try:
        os.setsid()
        _end_with_parent()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python's handlers must not reach the command
            signal.signal(number, signal.SIG_DFL)
        for file, place in ((os.open("/dev/null", os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(file, place)
        os.closerange(3, 4096)
        os.chdir(folder)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        os.environ.clear()
        os.environ.update(environment)
        arguments = [os.fsencode(word) for word in ["tessera", *words]]
        code = commands.tessera_command(len(arguments), (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None))
        ctypes.CDLL(None).fflush(None)
    except BaseException as error:
        os.write(2, f"the test's own process failed: {error!r}\n".encode())
    finally:
        os._exit(code)
