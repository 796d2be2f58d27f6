"""What every board of ranks has to keep, as tests: subclass, give two ranks' boards, and run pytest.

    class TestMine(RanksSuite):
        @pytest.fixture
        def boards(self): ...        # two objects, as two ranks would hold them, that reach the same empty place

The agreement of several ranks is then tried on these boards too.
"""

from __future__ import annotations

from tenuto.testing.ranks_suite.agreeing import Agreeing
from tenuto.testing.ranks_suite.keys import Keys


class RanksSuite(Keys, Agreeing):
    """The place that the fixture's boards reach is empty, and is not shared with another test."""
