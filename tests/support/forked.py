"""Processes of Python that start in milliseconds: forks of one that has imported what commands import.

`Popen([sys.executable, "-c", PROGRAM, ...])` of this module takes the place of `subprocess.Popen`. The process is a
child of ours with streams, environment and exit status of its own, and dies of signals like any other. Importing JAX,
Flax and the rest takes three seconds of CPU; here it is done once, by a server that never starts a JAX backend and so
has one thread. Where variables differ that are read by imports, and where there is no Linux, a new interpreter starts.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import inspect
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from support import few_programs, garbage, light_compile

PRELOADED = ("recjax.main", "recjax.cli.main", "matplotlib.figure", "matplotlib.backends.backend_agg")
_READ_BY_IMPORTS = ("JAX_", "XLA_", "PYTHON", "LD_", "TF_", "OMP_", "OPENBLAS_")
_EXECUTE: Any = vars(subprocess.Popen)["_execute_child"]  # where Popen comes to starting a process
_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`, for programs of Python: a command is `[sys.executable, "-c", PROGRAM, *arguments]`."""

    def _execute_child(self, *args: Any) -> None:
        asked = _asked(self, args)
        server = _server()
        if server is None or not server.serves(asked):
            _EXECUTE(self, *args)
            return
        self.pid = server.fork(asked)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[end] for end in ends))  # type: ignore[attr-defined]


def _asked(popen: subprocess.Popen[Any], args: tuple[Any, ...]) -> dict[str, Any]:
    return inspect.signature(_EXECUTE).bind(popen, *args).arguments


class _Server:
    """The process that forks, and how it is asked."""

    def __init__(self) -> None:
        self.socket, other = socket.socketpair()
        self.environment = dict(os.environ)
        # So that the malloc of a fork is that of a command whose GLIBC_TUNABLES are set, and that there is one thread.
        environment = self.environment | {"GLIBC_TUNABLES": "", "OPENBLAS_NUM_THREADS": "1"}
        environment.pop(light_compile.ASKED, None)  # each fork is asked
        program = f"from support import forked; forked.serve({other.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL
        )
        other.close()
        self.prctl = ctypes.CDLL(None).prctl

    def serves(self, asked: dict[str, Any]) -> bool:
        """Whether a fork does what was asked."""
        python, how, *_ = asked["args"]
        environment = asked["env"] or os.environ
        names = {name for name in (*environment, *self.environment) if name.startswith(_READ_BY_IMPORTS)}
        same = all(environment.get(name) == self.environment.get(name) for name in names)
        plain = not (asked["preexec_fn"] or asked["pass_fds"] or asked["start_new_session"] or asked["shell"])
        return python == sys.executable and how == "-c" and same and plain

    def fork(self, asked: dict[str, Any]) -> int:
        """Starts a program, and returns its process id. It becomes a child of this process."""
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [default if end == -1 else end for default, end in enumerate(ends)]
        message = json.dumps(
            {
                "command": [str(word) for word in asked["args"]],
                "cwd": os.fspath(asked["cwd"] or os.getcwd()),
                "env": dict(asked["env"] or os.environ),
            }
        ).encode()
        self.prctl(_SUBREAPER, 1, 0, 0, 0)  # the server's child is dead by the time it answers: ours is the grandchild
        try:
            socket.send_fds(self.socket, [struct.pack("Q", len(message))], fds)
            self.socket.sendall(message)
            (pid,) = struct.unpack("q", _receive(self.socket, 8))
        finally:
            self.prctl(_SUBREAPER, 0, 0, 0, 0)
        return int(pid)


@functools.cache
def _server() -> _Server | None:
    if not sys.platform.startswith("linux"):
        return None
    server = _Server()
    atexit.register(stop)
    return server


def stop() -> None:
    """Ends the server, if there is one."""
    if _server.cache_info().currsize:
        server = _server()
        if server is not None:
            server.socket.close()
            server.process.wait()
        _server.cache_clear()


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("the server of forked processes has ended")
        parts += part
    return parts


def serve(descriptor: int) -> None:
    """The server: forks for each request, until nobody is left to ask. In a fork it runs the program and returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever asks decides
    for name in PRELOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lack {len(threads) - 1} threads"
    garbage.collect_seldom()  # nor do forks
    importlib.import_module("support.pictures").draw_first()
    connection = socket.socket(fileno=descriptor)
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 8, 3)
        if not head:
            return
        request = json.loads(_receive(connection, struct.unpack("Q", head)[0]))
        read, write = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            program = os.fork()
            if program:
                os.write(write, struct.pack("q", program))
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for end in (read, write):
                os.close(end)
            connection.close()
            for number, end in enumerate(fds):
                os.dup2(end, number)
            for end in {*fds} - {0, 1, 2}:
                os.close(end)
            os.chdir(request["cwd"])
            _become(request["command"], request["env"])
            return
        os.close(write)
        os.waitpid(between, 0)
        connection.sendall(os.read(read, 8))
        for end in (read, *fds):
            os.close(end)


def _become(command: list[str], environment: dict[str, str]) -> None:
    """Runs a program in this process, which has been forked for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    _open_streams()
    sys.orig_argv = command  # a program that starts itself again gets a new interpreter ...
    sys.argv = ["-c", *command[3:]]
    subprocess.Popen = _Again  # type: ignore[misc]  # ... or one more fork
    for how in (light_compile, few_programs):
        if asked := environment.get(how.ASKED):
            how.stay_as(asked)
    import __main__

    exec(compile(command[2], "<string>", "exec"), __main__.__dict__)


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]


class _Again(subprocess.Popen[Any]):
    """In a fork: the process that runs the same command again, as a supervisor does, is a fork of it."""

    def _execute_child(self, *args: Any) -> None:
        asked = _asked(self, args)
        if list(asked["args"]) != sys.orig_argv or {asked[end] for end in ("p2cread", "c2pwrite", "errwrite")} != {-1}:
            _EXECUTE(self, *args)
            return
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        status = 1
        try:
            kept = sorted({0, 1, 2, *asked["pass_fds"]})
            for after, end in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(after + 1, end)
            _become(sys.orig_argv, dict(asked["env"] or os.environ))
            status = 0
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:  # what an interpreter does at its end, but not what the process that was forked still has to do
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(status)
