"""Confines a forked child that is going to call code nobody trusts.

Policy is the parent's: the program of the filter comes from there as bytes. Here it is installed for
every thread of the process, and then what it must refuse is tried. Until that has succeeded a child
with a candidate in it runs no batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import model
from .kernels import Kernel
from .wire import Handler, RequestError

_MODE_FILTER, _TSYNC = 1, 1
_INSTRUCTION = 8


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def gate(subject: Any, handlers: dict[str, Handler]) -> dict[str, Handler]:
    """The handlers, where a candidate is in the subject with `confine` among them and with `batch` shut until
    it has been called."""
    if subject.kernels is None:
        return handlers
    open_batch = handlers["batch"]

    def confine(body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        if subject.draw is not None:
            with originals(subject.kernels):
                finish(subject)
        start_threads()
        install(bytes.fromhex(body["program"]), int(body["install"]))
        if possible := still_possible(executable=bool(body["executable"])):
            raise RequestError("not_confined", f"a confined child can still {', '.join(possible)}")
        handlers["batch"] = open_batch
        return {}

    def shut(_body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        raise RequestError("not_confined", "a candidate can't run before its process is confined")

    handlers = {**handlers, "confine": confine, "batch": shut}
    return handlers


def finish(subject: Any) -> None:
    """Calls a model once, for what it does at its first call only and can't do behind the wall: a model with
    graph breaks compiles what comes after the first one, and libraries write machine code."""
    args, kwargs = model.copy_inputs(subject.draw(0))
    subject.run(*args, **kwargs)


@contextlib.contextmanager
def originals(kernels: list[Kernel]) -> Iterator[None]:
    """Meanwhile these kernels' functions run their regions' own operators, in whatever has bound them."""
    before = [(function, function.__code__) for kernel in kernels for function in kernel.functions()]
    try:
        for kernel in kernels:
            for function in kernel.functions():
                # The argument list stays what it was; the names it needs are in the function's own scope.
                arguments = ", ".join(function.__code__.co_varnames[: function.__code__.co_argcount])
                scope: dict[str, Any] = {}
                exec(f"def plain({arguments}):\n    return plain_operators({arguments})", scope)  # noqa: S102: text written above
                function.__globals__["plain_operators"] = kernel.plain
                function.__code__ = scope["plain"].__code__
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def start_threads() -> None:
    """Makes torch's OpenMP pool at its full size: the filter reaches the threads that are there, and those
    that come later."""
    torch.empty(1 << 16, torch.get_num_threads(), dtype=torch.float32).fill_(0)


def install(program: bytes, number: int) -> None:
    """Installs a filter in all threads of this process, for good."""
    if not program or len(program) % _INSTRUCTION:
        raise RequestError("not_confined", "the filter is cut short")
    text = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // _INSTRUCTION, ctypes.addressof(text))
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    # A thread that could not follow is named by its id: anything but zero is a failure.
    done = library.syscall(ctypes.c_long(number), ctypes.c_ulong(_MODE_FILTER), ctypes.c_ulong(_TSYNC), ctypes.byref(described))
    if done != 0:
        why = os.strerror(ctypes.get_errno()) if done < 0 else f"thread {done} can't be reached"
        raise RequestError("not_confined", f"no system-call filter: {why}")


def still_possible(executable: bool) -> list[str]:
    """What should be refused and is not. Each of these succeeds in a process without the filter."""

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def write_file() -> None:
        os.close(os.open("/dev/null", os.O_WRONLY))

    def executable_memory() -> None:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()

    def send_signal() -> None:
        os.kill(os.getpid(), 0)

    attempts: dict[str, Callable[[], Any]] = {
        "start a process": fork,
        "open a file for writing": write_file,
        "make a socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close(),
        "make a memory file": lambda: os.close(os.memfd_create("probe")),
        "send signals": send_signal,
        "leave its group": lambda: os.setpgid(0, 0),
        "choose its processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
        "set an alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
    }
    if not executable:
        attempts["make memory executable"] = executable_memory
    return [what for what, attempt in attempts.items() if not _refused(attempt)]


def _refused(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno == errno.EPERM
    return False
