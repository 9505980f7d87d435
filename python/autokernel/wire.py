"""JSON lines over a socket, with file descriptors where a request brings some.

A request is ``{"id": n, "op": "...", ...}``; the reply is ``{"id": n, "ok": {...}}`` or
``{"id": n, "error": {"kind", "message", "traceback"}}``. This module imports no torch, so that a
broken installation can still be reported in words.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[[dict[str, Any], "list[int]"], dict[str, Any]]

_CHUNK = 1 << 16
_MAX_DESCRIPTORS = 8
_MAX_TRACEBACK = 16_384


class RequestError(Exception):
    """An error reply with a kind that the parent knows; further fields travel along."""

    def __init__(self, kind: str, message: str, **facts: Any):
        super().__init__(message)
        self.kind = kind
        self.facts = facts


class Stop(Exception):
    """Raised by a handler to reply with ``result`` and then leave ``serve``."""

    def __init__(self, result: dict[str, Any] | None = None):
        super().__init__("stop")
        self.result = result or {}


class Connection:
    """One end of a stream socket that carries a JSON object a line."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    @classmethod
    def from_fd(cls, fd: int) -> Connection:
        """Takes over a descriptor, such as one that came with a request."""
        return cls(socket.socket(fileno=fd))

    @classmethod
    def from_environment(cls) -> Connection:
        """The socket that the parent named in AUTOKERNEL_FD.

        Standard output becomes standard error: what a user's model prints must never be taken for
        a message, and must not be lost either.
        """
        fd = int(os.environ.pop("AUTOKERNEL_FD"))
        os.set_inheritable(fd, False)
        redirect_stdout()
        return cls.from_fd(fd)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and the descriptors that came with it; ``None`` when the peer is gone."""
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                descriptors, self._descriptors = self._descriptors, []
                return json.loads(line), descriptors
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, _CHUNK, _MAX_DESCRIPTORS)
            except ConnectionResetError:
                return None
            self._descriptors += descriptors
            if not data:
                return None
            self._buffer += data

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message. NaN and infinities have no place in JSON and are refused."""
        self.sock.sendall(json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Closes the socket and descriptors that nobody asked for."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = []
        self.sock.close()


def redirect_stdout() -> None:
    """Sends everything printed from here on, also by native code, to standard error."""
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def describe(error: BaseException) -> dict[str, Any]:
    """The error part of a reply."""
    kind = error.kind if isinstance(error, RequestError) else "internal"
    facts = error.facts if isinstance(error, RequestError) else {}
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
    return {**facts, "kind": kind, "message": message, "traceback": text[-_MAX_TRACEBACK:]}


def serve(connection: Connection, handlers: Mapping[str, Handler]) -> None:
    """Answers requests until the peer is gone or a handler raises ``Stop``."""
    while (received := connection.receive()) is not None:
        body, descriptors = received
        identity, op = body.get("id"), body.get("op")
        try:
            handler = handlers.get(op)
            if handler is None:
                raise RequestError("unknown_op", f"no operation named {op!r}")
            reply = {"id": identity, "ok": handler(body, descriptors)}
        except Stop as stop:
            connection.send({"id": identity, "ok": stop.result})
            return
        except (KeyboardInterrupt, SystemExit) as error:
            # A model file that calls sys.exit() must not look like a crash of the bridge.
            if isinstance(error, KeyboardInterrupt):
                raise
            reply = {"id": identity, "error": describe(RequestError("model_raises", f"sys.exit({error.code!r}) was called"))}
        except Exception as error:  # noqa: BLE001: every failure becomes a reply
            reply = {"id": identity, "error": describe(error)}
        connection.send(reply)
