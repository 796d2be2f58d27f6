"""Ports on loopback for servers that are started with one."""

from __future__ import annotations

import socket
from contextlib import suppress
from secrets import randbelow
from typing import Final

HOST: Final = "127.0.0.1"
_FIRST: Final = 10_000
_COUNT: Final = 20_000
"""Below 32768, from where on Linux gives ports to those who ask for any: one of those could be taken by anybody between
here and the start of the server."""


def free_port() -> int:
    """A port that nobody listens on, one of so many that no two tests on a machine get the same at the same time.

    Raises OSError where a hundred of them are taken.
    """
    for _ in range(100):
        port = _FIRST + randbelow(_COUNT)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    raise OSError(f"none of a hundred ports of {HOST} can be had")
