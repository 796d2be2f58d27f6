"""Every reader of bytes, given its valid inputs changed at random, and every input that has ever broken a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.fuzz.audit import watched
from campaigns.fuzz.mutate import mutations
from campaigns.fuzz.seeds import make
from campaigns.fuzz.targets import TARGETS, Broken, Target, sealed
from tenuto.errors import CorruptionError, TenutoError

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def seeds() -> dict[str, list[bytes]]:
    return make()


def refusal(target: Target, data: bytes) -> TenutoError | None:
    """What the reader refuses the bytes with, None if it reads them. Whatever is no error of ours is raised."""
    try:
        target.run(data)
    except TenutoError as error:
        return error
    return None


def test_there_is_a_corpus_and_every_part_of_it_has_a_reader() -> None:
    assert KEPT and {path.parent.name for path in KEPT} <= TARGETS.keys()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_broke_a_rule_breaks_none(path: Path) -> None:
    target, data = TARGETS[path.parent.name], path.read_bytes()
    watched(target, data)  # raises what it does that reading must not do
    found = refusal(target, data)
    assert found is None or found.message


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_valid_inputs_are_read(target: Target, seeds: dict[str, list[bytes]]) -> None:
    assert seeds[target.name]
    assert [refusal(target, data) for data in seeds[target.name]] == [None] * len(seeds[target.name])


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_i10_valid_inputs_changed_at_random(target: Target, seeds: dict[str, list[bytes]]) -> None:
    for data in seeds[target.name]:
        target(data)
    refused = 0
    for number, data in enumerate(mutations(seeds[target.name], target.words, seed=20, count=120)):
        watched(target, data, memory=number % 8 == 0)
        refused += refusal(target, data) is not None
    assert refused > 10


def test_a_reader_that_does_what_it_must_not_is_told() -> None:
    def opens(data: bytes) -> None:
        Path("/etc/hostname").read_bytes()

    def hoards(data: bytes) -> None:
        bytes(64 << 20)

    def leaks(data: bytes) -> None:
        raise OverflowError

    with pytest.raises(Broken, match="open"):
        watched(Target("opens", opens), b"")
    with pytest.raises(Broken, match="MiB"):
        watched(Target("hoards", hoards), b"")
    with pytest.raises(OverflowError):
        watched(Target("leaks", leaks), b"")


def test_the_seal_is_the_products_own(seeds: dict[str, list[bytes]]) -> None:
    from tenuto.model.canonical_json import open_seal

    for data in seeds["begin"]:
        open_seal(sealed(data), name="begin")
        with pytest.raises(CorruptionError):
            open_seal(sealed(data)[:-3] + b'0"}', name="begin")
