"""What the monitors of two ranks say to each other: JSON, one object a line, over sockets that never block."""

from __future__ import annotations

import json
import platform
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from helix.comm.progress import Pulse

_MAX_LINE_BYTES = 16384

# Message kinds and the types of their fields.
_SHAPES: dict[str, dict[str, type]] = {
    "hello": {"token": str, "rank": int, "pid": int, "host": str},
    "ready": {"pid": int, "host": str},
    "pulse": {"num_collectives": int, "num_moves": int, "label": str, "idle": bool, "limit_s": float},
    "report": {"cause": str, "reason": str},
    "verdict": {"rank": int, "reason": str, "kill": list},
    "bye": {},
}


def pulse_of(message: dict[str, Any]) -> Pulse:
    return Pulse(**{name: message[name] for name in _SHAPES["pulse"]})


def encode(kind: str, **fields: Any) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message in `line`, or None where it is not of a kind and shape of `_SHAPES`."""
    try:
        message = json.loads(line) if len(line) <= _MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    shape = _SHAPES.get(message["kind"])
    if shape is None or any(type(message.get(name)) is not wanted for name, wanted in shape.items()):
        return None
    return message


class Link:
    """A connection that carries whole messages. `alive` ends with the stream, or with nonsense in it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.alive = True
        self._writable = True
        self._rest = b""

    def place(self, host: str, own_host: str) -> str:
        """``on ADDRESS`` and a space where the peer, whose `host_identity` is `host`, is on another machine."""
        with suppress(OSError):
            return "" if host == own_host else f"on {self.sock.getpeername()[0]} "
        return ""

    def send(self, kind: str, **fields: Any) -> None:
        """Best effort: a peer that reads no more is found by its silence, and one that is gone by `receive`."""
        data = encode(kind, **fields)
        with suppress(OSError):
            if self._writable:
                self._writable = self.sock.send(data) == len(data)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, up to the first that makes no sense."""
        try:
            chunk = self.sock.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self.alive = bool(chunk) and len(self._rest) <= _MAX_LINE_BYTES
        messages = []
        for line in lines:
            message = decode(line)
            if message is None:
                self.alive = False
                break
            messages.append(message)
        return messages


def listen(master_addr: str) -> socket.socket:
    """A listening socket on a free port of the interface that has `master_addr`.

    On all interfaces where this machine has no such address (it stands behind address translation), or where its hosts
    file maps its own name to the loopback interface, on which no other node could reach it.
    """
    with suppress(OSError):
        for family, _kind, _protocol, _name, address in socket.getaddrinfo(master_addr, 0, type=socket.SOCK_STREAM):
            host = str(address[0])
            if ip_address(host).is_loopback and master_addr not in ("localhost", host):
                break
            with suppress(OSError):
                return socket.create_server((host, 0), family=family)
    return socket.create_server(("", 0))


def host_identity() -> str:
    """Equal for two processes exactly where one can name the other by its process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()
