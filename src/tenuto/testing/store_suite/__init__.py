"""The contract of every store, as tests: subclass, give a `store` and three methods that bypass it, and run pytest.

    class TestMine(StoreSuite):
        @pytest.fixture
        def store(self): ...

        def raw_put(self, store, name, data): ...
        def raw_get(self, store, name): ...
        def raw_delete(self, store, name): ...

A wrapper must pass the same suite as the store it wraps.
"""

from __future__ import annotations

from tenuto.testing.store_suite.listing import ListingAndRemoving, Naming
from tenuto.testing.store_suite.putting import Putting
from tenuto.testing.store_suite.reading import Reading


class StoreSuite(Putting, Reading, ListingAndRemoving, Naming):
    """The fixture's store is empty, and not shared with another test."""
