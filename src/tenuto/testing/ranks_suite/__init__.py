"""The contract of every key-value store of ranks, as tests: subclass, give two ranks' stores, and run pytest.

    class TestMine(RanksSuite):
        @pytest.fixture
        def boards(self): ...        # two objects, as two ranks would hold them, that reach the same empty place

The agreement of several ranks is tested on these stores too.
"""

from __future__ import annotations

from tenuto.testing.ranks_suite.agreeing import Agreeing
from tenuto.testing.ranks_suite.keys import Keys


class RanksSuite(Keys, Agreeing):
    """The place reached by the fixture's stores is empty, and not shared with another test."""
