"""Google's client and our words for its service, in front of moto, whose headers are translated. Google's own service
is not here."""

from __future__ import annotations

from stores.cases import Faults, Suite


class TestSuite(Suite):
    server_name = "google"


class TestFaults(Faults):
    server_name = "google"
