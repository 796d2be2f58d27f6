"""One process by itself is the coordinator; torch is never imported to find out."""

from __future__ import annotations

import subprocess
import sys

from tenuto.ranks.contract import Ranks
from tenuto.ranks.detection import Solo


def test_one_process_is_the_coordinator() -> None:
    ranks = Solo()
    assert isinstance(ranks, Ranks)
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator) == (0, 1, True)


def test_torch_is_not_imported() -> None:
    code = "import sys, tenuto; tenuto.Solo(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
