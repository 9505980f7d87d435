"""System-call filters by hand, in place of the ones that the parent sends: enough to pass a child's own test."""

from __future__ import annotations

import errno
import platform
import struct

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARGUMENTS = 0, 16
_CLONE_THREAD = 0x10000

#: Of each architecture: installing a filter, calls that are refused, and those that are when a bit of an
#: argument is set (`openat` for writing) or not set (`clone` of a thread).
_CALLS = {
    "x86_64": (317, {"vfork": 58, "kill": 62, "setpgid": 109, "sched_setaffinity": 203, "setitimer": 38, "socket": 41, "memfd_create": 319, "fork": 57}, 257, 56),
    "aarch64": (277, {"kill": 129, "setpgid": 154, "sched_setaffinity": 122, "setitimer": 103, "socket": 198, "memfd_create": 279}, 56, 220),
}


def wall(without: str = "") -> dict:
    """The body of a `confine` request; `without` names a call that stays possible."""
    install, refused, openat, clone = _CALLS[platform.machine()]
    refuse = [_step(_RETURN, _REFUSE)]
    program = [_step(_LOAD, _NUMBER)]
    for name, number in refused.items():
        if name != without:
            program += [_step(_EQUAL, number, 0, 1), *refuse]
    program += [_step(_EQUAL, openat, 0, 3), _step(_LOAD, _ARGUMENTS + 16), _step(_ANY_BIT, 3, 0, 1), *refuse]
    program += [_step(_LOAD, _NUMBER), _step(_EQUAL, clone, 0, 3), _step(_LOAD, _ARGUMENTS), _step(_ANY_BIT, _CLONE_THREAD, 1, 0), *refuse]
    program += [_step(_RETURN, _ALLOW)]
    return {"program": b"".join(program).hex(), "install": install, "executable": True}


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
