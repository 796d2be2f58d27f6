"""What `tenuto bench` says follows from its figures, and from nothing else."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.bench import figures
from tenuto.bench.figures import WORDS, Figures
from tenuto.bench.place import FileSystemFacts

SECONDS = {
    figures.COPY: [0.16, 0.17, 0.18],
    figures.DIGEST: [0.05, 0.05, 0.05],
    figures.FLUSH: [0.0011, 0.0012, 0.0013],
    figures.WRITE_DIRECT: [0.40, 0.42, 0.44],
    figures.WRITE_BUFFERED: [0.60, 0.62, 0.65],
    figures.READ_COLD: [0.50, 0.55, 0.56],
    figures.READ_HOT: [0.10, 0.11, 0.12],
    figures.STALL: [0.16, 0.20, 0.21],
    figures.DURABLE: [0.70, 0.80, 0.90],
    figures.SYNC: [0.48, 0.50, 0.52],
    figures.RESTORE_COLD: [0.80, 0.82, 0.90],
    figures.RESTORE_HOT: [0.16, 0.17, 0.18],
}
QUIET = Figures(
    where="/data",
    file_system=FileSystemFacts("ext4", volatile=False, network=False),
    nbytes=1 << 30,
    leaves=200,
    made_of="torch 2.13.0 tensors, 2 threads",
    seconds=SECONDS,
    prewarm_s=0.45,
    arena="shared memory",
    direct=True,
    links=True,
    cold=True,
)


def changed(**fields):
    return dataclasses.replace(QUIET, **fields)


def test_a_quiet_place_is_told_in_figures_and_needs_no_warning():
    assert figures.heading(QUIET) == ["/data  (ext4)", "1.00 GiB in 200 leaves, torch 2.13.0 tensors, 2 threads"]
    assert figures.rows(QUIET)[3] == ("write, buffered, flushed", "0.62 s", "0.60 s to 0.65 s", "1.61 GiB/s")
    assert figures.rows(QUIET)[6] == ("small file, flushed", "1.2 ms", "1.1 ms to 1.3 ms", "")
    assert [row[0] for row in figures.rows(QUIET)] == list(WORDS.values())
    assert figures.expectations(QUIET) == [
        "Each save blocks training for about 0.20 s; the checkpoint is durable 0.80 s after it began, and until then "
        "training shares processor, memory and disk with it.",
        "Saves block training for at most a given share of its time if they are taken every 3.80 s for 5 %, "
        "every 19.8 s for 1 %, every 3 min 20 s for 0.1 % (no more often than a save takes; what training loses while "
        "a save is written depends on the training and is not included).",
        "A save that is waited for takes 0.50 s; the first 0.45 s of a Checkpointer go into taking and touching "
        "memory.",
        "A restore takes about 0.82 s from a cold disk, 0.17 s if the page cache still holds it, every byte verified.",
    ]
    assert figures.warnings(QUIET) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"direct": False}, "No direct I/O on this file system (ext4)"),
        ({"links": False}, "No hard links here"),
        ({"cold": False}, "The page cache did not drop the files"),
        ({"arena": "anonymous"}, "a larger /dev/shm"),
        ({"file_system": FileSystemFacts("tmpfs", True, False)}, "nothing there outlives the machine"),
        ({"file_system": FileSystemFacts("nfs4", False, True)}, "This is a network file system (nfs4)"),
        ({"notes": ("it is odd",)}, "The saves said: it is odd."),
        ({"leftovers": ("/data/.tenuto-bench-x",)}, "rm -r /data/.tenuto-bench-x"),
        ({"seconds": SECONDS | {figures.FLUSH: [0.03]}}, "A flush takes 30.0 ms"),
        ({"seconds": SECONDS | {figures.SYNC: [1.0]}}, "reaches 42% of the raw speed"),
        ({"seconds": SECONDS | {figures.COPY: [0.1, 0.2]}}, "took 2.0 times the fastest"),
    ],
)
def test_each_finding_is_one_warning_with_what_to_do(fields, words):
    (warning,) = figures.warnings(changed(**fields))
    assert words in warning


@given(st.floats(1e-4, 100), st.floats(1e-4, 100), st.sampled_from(figures.SHARES))
def test_saves_at_the_interval_hold_training_for_the_share_and_no_more(stall, write, share):
    found = changed(seconds=SECONDS | {figures.STALL: [stall], figures.DURABLE: [stall + write]})
    every = figures.interval(found, share)
    assert stall / (stall + every) <= share * (1 + 1e-9)
    assert every >= stall + write
    if every > stall + write:
        assert stall / (stall + every * 0.99) > share


def test_the_document_holds_what_the_words_say():
    found = figures.document(changed(direct=False))
    assert found["median_s"]["save_stall"] == 0.20
    assert found["save_every_s"]["0.05"] == pytest.approx(3.8)
    assert found["rounds_s"]["copy"] == [0.16, 0.17, 0.18]
    assert (found["bytes"], found["direct_io"], len(found["warnings"])) == (1 << 30, False, 1)
