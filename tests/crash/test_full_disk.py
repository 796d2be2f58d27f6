"""Real file systems that fill up or turn read-only in the middle of a save. They need a mount namespace: `unshare -m`
as root, or user namespaces; nothing else stands in for them, so where there are none the test is skipped."""

from __future__ import annotations

import pytest

from campaigns.faulty_disk.full import SPARES, STAGES, fill_all, trials


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_that_fills_up_in_the_middle_of_a_save(kind: str) -> None:
    found = fill_all(some=20, kinds=(kind,))
    if found[0].skipped:
        pytest.skip(found[0].skipped)
    assert [one for one in found if one.violations] == []
    assert len(found) == len(trials(kind)[::20]) + 1
    assert any("3 (StoreFull)" in one.said for one in found)


def test_the_trials_fill_every_stage_to_every_level() -> None:
    tried = {(one.stage, one.spare) for one in trials("tmpfs") if one.place == "tmpfs"}
    assert tried == {(stage, spare) for stage in STAGES for spare in SPARES}
