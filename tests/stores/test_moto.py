"""moto, which is fast and forgets: everything but kills."""

from __future__ import annotations

from stores.cases import Faults, Suite


class TestSuite(Suite):
    server_name = "moto"


class TestFaults(Faults):
    server_name = "moto"
