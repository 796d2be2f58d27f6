"""What commands may say of a place: what fits its own manifest stays, what was put is read back, and what its store
does not let be read is neither missing nor damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import Tier, Tiers, every, keep
from tenuto.cli import main
from tenuto.errors import ObjectNotFound, StoreDenied
from tenuto.model import canonical_json
from tenuto.repo.notes import notes, verification_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.local.store import LocalStore
from tenuto.store.registry import open_store

PACK = "rank-00000.safetensors"


def train(where: Any, steps: int, value: float = 1.0, **more: Any) -> None:
    state = {"w": np.zeros(3000), "frozen": np.arange(40_000.0)}
    with tenuto.Checkpointer(where, state, save=every(steps=1), **more) as ckpt:
        ckpt.restore()
        for step in ckpt.steps(steps):
            state["w"][step] = value
            state["frozen"] += value if step == 1 else 0.0


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        told = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((told.out + told.err).split())

    return run


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Places that answer each request for an object with an error, and list their objects all the same."""
    places: set[str] = set()

    def answering(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: LocalStore, name: str, **more: Any) -> Any:
            if store.url in places and not name.startswith("tenuto"):
                raise StoreDenied(f"503: {store.url} does not answer", subject=name)
            return method(store, name, **more)

        return call

    for name in ("get", "open", "stat"):
        monkeypatch.setattr(LocalStore, name, answering(getattr(LocalStore, name)))
    return places


# -- what fits its own manifest ----------------------------------------------------------------------------------------


def other_line(tmp_path: Path) -> tuple[Path, Path]:
    """A primary that was set back, and has trained on alone: its tier has another line of training under the same
    numbers."""
    home, tier = tmp_path / "home", tmp_path / "tier"
    train(Tiers(Tier(home), Tier(tier)), 2)
    shutil.copytree(home, tmp_path / "backup")
    train(Tiers(Tier(home), Tier(tier)), 4)
    shutil.rmtree(home)
    (tmp_path / "backup").rename(home)
    train(home, 4, value=2.0)
    return home, tier


def test_repair_and_verify_leave_another_line_of_training_in_a_tier_alone(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    home, tier = other_line(tmp_path)
    before = files(tier)
    status, told = command("verify", home)
    assert status == 0 and "another checkpoint under this name" in told and "DAMAGED" not in told
    status, told = command("repair", home, "--yes")
    assert status == 0 and "nothing to repair" in told
    assert files(tier) == before
    assert command("verify", tier)[0] == 0


def test_repair_leaves_it_alone_where_the_primary_s_is_damaged_or_a_base_in_the_trash(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    """In the trash it lies for the data files that a later one needs."""
    home, tier = tmp_path / "home", tmp_path / "tier"
    settings: dict[str, Any] = {"encoding": "dedupe", "keep": keep.all()}
    train(Tiers(Tier(home), Tier(tier)), 1, **settings)
    shutil.copytree(home, tmp_path / "backup")
    train(Tiers(Tier(home), Tier(tier)), 3, **settings)
    shutil.rmtree(home)
    (tmp_path / "backup").rename(home)
    train(home, 4, value=2.0, encoding="dedupe", keep=keep.latest(1))
    assert list((home / "trash").rglob("*.json")), "a base"
    table = next(home.glob("runs/main/a0002/step-00000004/*.index"))
    table.write_bytes(table.read_bytes()[:-3])
    before = files(tier)
    assert command("repair", home, "--yes")[0] == 12
    assert files(tier) == before
    assert command("verify", tier)[0] == 0


def test_what_is_damaged_is_not_read_from_another_line_of_training(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    home, tier = other_line(tmp_path)
    (manifest,) = home.glob("runs/main/a0002/step-00000004/manifest.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-30] + b"?" + whole[-29:])
    assert tenuto.load(home).step == 3
    with pytest.raises(tenuto.errors.CorruptionError):
        tenuto.load(home, step=4)
    claim = home / "runs/main/a0002/attempt.json"
    claim.write_bytes(claim.read_bytes()[:-9])
    before = files(tier)
    assert command("repair", home, "--yes")[0] == 12
    assert claim.read_bytes() != (tier / "runs/main/a0002/attempt.json").read_bytes(), "another job's claim"
    assert files(tier) == before


@pytest.mark.parametrize("where", ["home", "tier"])
@pytest.mark.parametrize("file", ["manifest.json", "begin.json", "rank-00000.index", "rank-00000.pack"])
def test_a_base_in_the_trash_that_a_tier_keeps_is_repaired_in_both(
    tmp_path: Path, command: Callable[..., tuple[int, str]], where: str, file: str
) -> None:
    home, tier = tmp_path / "home", tmp_path / "tier"
    train(Tiers(Tier(home, keep=keep.latest(1)), Tier(tier, keep=keep.all())), 3, encoding="dedupe")
    assert not (home / "runs/main/a0001/step-00000001/manifest.json").exists(), "it lies in the trash"
    path = tmp_path / where / "runs/main/a0001/step-00000001" / file
    if not path.exists():
        pytest.skip("of the primary's it lies in the trash")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + b"wrong")
    assert command("repair", home, "--yes")[0] == 0
    assert path.read_bytes() == whole
    assert command("verify", home)[0] == 0 == command("verify", tier)[0]


def test_a_tier_has_no_encoding_of_its_own_and_what_one_had_is_refused_and_kept(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    home, tier = tmp_path / "home", tmp_path / "tier"
    with pytest.raises(tenuto.errors.UsageError, match="stores each checkpoint as the primary does") as refused:
        Tier(tier, encoding="small")
    assert "tenuto repack" in str(refused.value.hint)
    train(Tiers(Tier(home), Tier(tier)), 2)
    (manifest,) = tier.glob("runs/main/a0001/step-00000002/manifest.json")
    found = canonical_json.open_seal(manifest.read_bytes(), name=manifest.name)
    del found["digest"]
    found["environment"]["encoding"] = {"tier": {"codec": "zstd", "dedupe": True, "delta": 8, "level": 3}}
    manifest.write_bytes(canonical_json.seal(found))
    (manifest.parent / "rank-00000.index").write_bytes(b"of another encoding")
    before = files(tier)
    for words in (["show", tier], ["verify", tier], ["gc", tier, "--now"]):
        status, told = command(*words)
        assert status in (14, 18) and ("encoding of its tier's own" in told or "no change is made here" in told), told
    assert command("repair", home, "--yes")[0] == 0
    train(Tiers(Tier(home), Tier(tier)), 3)
    assert before.items() <= files(tier).items()


# -- read back ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A store whose puts of some names are not what it gives back: by the end of the name, `flip` or `fail`."""
    how: dict[str, str] = {}
    put, get, opened = LocalStore.put_if_absent, LocalStore.get, LocalStore.open
    unread: set[str] = set()

    def lie(store: LocalStore, name: str, content: Any, *, token: str) -> Any:
        kind = next((kind for end, kind in how.items() if name.endswith(end) and "/home" in store.url), "")
        if kind == "fail":
            unread.add(name)
        if kind == "flip":
            data = bytearray(b"".join(bytes(piece) for piece in content.pieces()))
            data[-1] ^= 1
            content = Bytes(bytes(data))
        return put(store, name, content, token=token)

    def answer(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: LocalStore, name: str, **more: Any) -> Any:
            if name in unread and "/home" in store.url:
                raise StoreDenied("503: does not answer", subject=name)
            return method(store, name, **more)

        return call

    monkeypatch.setattr(LocalStore, "put_if_absent", lie)
    monkeypatch.setattr(LocalStore, "get", answer(get))
    monkeypatch.setattr(LocalStore, "open", answer(opened))
    return how


@pytest.mark.parametrize("file", [PACK, "rank-00000.index"])
@pytest.mark.parametrize("kind", ["flip", "fail"])
def test_what_is_put_is_read_back_before_it_counts_as_repaired(
    tmp_path: Path, command: Callable[..., tuple[int, str]], lying: dict[str, str], kind: str, file: str
) -> None:
    home = tmp_path / "home"
    train(home, 2)
    tenuto.Repository(home).replicate(tmp_path / "copy")
    next(home.glob(f"runs/main/a0001/step-00000002/{file}")).unlink()
    lying[file] = kind
    status, told = command("repair", home, "--yes")
    wrong = "was put, and reads otherwise" if kind == "flip" else "was put, and could not be read back: 503"
    assert status == 12 and f"FAILED runs/main/a0001/step-00000002/{file}" in told and wrong in told
    assert "0 objects repaired" in told


def test_a_manifest_is_read_back_and_its_copy_stays_in_the_trash_until_then(
    tmp_path: Path, command: Callable[..., tuple[int, str]], lying: dict[str, str]
) -> None:
    home = tmp_path / "home"
    train(home, 2)
    tenuto.Repository(home).replicate(tmp_path / "copy")
    (manifest,) = home.glob("runs/main/a0001/step-00000002/manifest.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-30] + b"?" + whole[-29:])
    lying["manifest.json"] = "flip"
    status, told = command("repair", home, "--yes")
    assert status == 12 and "manifest.json in" in told and "reads otherwise" in told
    assert whole in [path.read_bytes() for path in (home / "trash").rglob("*.json")]
    lying.clear()
    assert command("repair", home, "--yes")[0] == 0
    assert manifest.read_bytes() == whole


# -- what is not judged ------------------------------------------------------------------------------------------------


def test_verify_says_nothing_of_what_its_store_does_not_let_be_read(
    tmp_path: Path, command: Callable[..., tuple[int, str]], silent: set[str]
) -> None:
    home = tmp_path / "home"
    train(Tiers(Tier(home), Tier(tmp_path / "tier")), 2)
    silent.add(str(tmp_path / "tier"))
    status, told = command("verify", home, "--note")
    assert status == 18 and "DAMAGED" not in told and "missing" not in told and "lacks" not in told
    assert "UNREAD" in told and "so it may be whole or not: in" in told and "could not be read" in told
    repo = Repo.open(open_store(home))
    assert {verification_of(notes(repo, id)) for id in repo.checkpoints()} == {""}
    silent.clear()
    assert command("verify", home, "--note")[0] == 0


def test_a_store_that_fails_in_the_middle_of_a_scan_makes_nothing_suspect(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenuto.store.local.reader import LocalReader

    train(tmp_path / "home", 2)
    fetch = LocalReader.read_into

    def failing(reader: LocalReader, offset: int, buffer: Any) -> None:
        if reader.name.endswith(PACK) and offset > 0:
            raise StoreDenied("503: slow down", subject=reader.name)
        fetch(reader, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_into", failing)
    for words in (["verify", tmp_path / "home", "--note"], ["scrub", tmp_path / "home", "--every", "0.001s"]):
        status, told = command(*words)
        assert status == 18 and "DAMAGED" not in told and "503: slow down" in told
    repo = Repo.open(open_store(tmp_path / "home"))
    assert {verification_of(notes(repo, id)) for id in repo.checkpoints()} == {""}


def test_repair_judges_the_others_where_a_place_does_not_answer(
    tmp_path: Path, command: Callable[..., tuple[int, str]], silent: set[str]
) -> None:
    home = tmp_path / "home"
    train(Tiers(Tier(home), Tier(tmp_path / "tier")), 2)
    tenuto.Repository(home).replicate(tmp_path / "copy")
    silent.add(str(tmp_path / "tier"))
    status, told = command("repair", home, "--yes")
    assert status == 18 and "not looked at:" in told and "503" in told and "missing" not in told
    (pack,) = home.glob(f"runs/main/a0001/step-00000001/{PACK}")
    whole = pack.read_bytes()
    pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    command("repair", home, "--yes")
    assert pack.read_bytes() == whole


def test_replicate_and_status_do_not_say_that_a_place_lacks_what_it_does_not_let_be_seen(
    tmp_path: Path, command: Callable[..., tuple[int, str]], silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, tier, copy = tmp_path / "home", tmp_path / "tier", tmp_path / "copy"
    train(Tiers(Tier(home), Tier(tier)), 2)
    tenuto.Repository(home).replicate(copy)
    silent.add(str(copy))
    status, told = command("replicate", home, copy, "--check")
    assert status == 18 and "UNREAD" in told and "MISSING" not in told and "DAMAGED" not in told
    silent.clear()
    assert command("replicate", home, copy, "--check")[0] == 0
    children = LocalStore.children

    def failing(store: LocalStore, prefix: str, **more: Any) -> Any:
        if store.url == str(tier):
            raise StoreDenied("503: does not answer", subject=store.url)
        return children(store, prefix, **more)

    monkeypatch.setattr(LocalStore, "children", failing)
    status, told = command("replicate", home)
    assert status == 18 and "nothing to copy" in told and "503" in told
    status, told = command("status", home, "--json")
    assert '"problem": "503: does not answer"' in told


def test_an_absent_object_is_still_missing(tmp_path: Path, command: Callable[..., tuple[int, str]]) -> None:
    train(tmp_path / "home", 1)
    next((tmp_path / "home").glob(f"runs/main/a0001/step-00000001/{PACK}")).unlink()
    status, told = command("verify", tmp_path / "home")
    assert status == 12 and "is missing" in told
    assert issubclass(ObjectNotFound, tenuto.errors.StoreError)
