"""Azure's Blob Storage."""

from __future__ import annotations

from stores.cases import Access, Faults, Suite


class TestSuite(Suite):
    server_name = "azurite"


class TestAccess(Access):
    server_name = "azurite"


class TestFaults(Faults):
    server_name = "azurite"
