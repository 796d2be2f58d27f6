"""Every hostile file, in its place in a repository that vouches for it: an error or a clean refusal that names the
object, bounded memory, no code run, nothing outside of the repository opened, nothing told to the terminal."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import xxhash

import tenuto
from attacks.make_attacks import GOLDEN, HARMLESS, HERE, INDEX, MANIFEST, PACK, attacks, dumped, joined, sealed
from campaigns.fuzz.audit import recording
from tenuto.cli import main
from tenuto.errors import TenutoError

ATTACKS = [json.loads(line) for line in (HERE / "attacks.jsonl").read_text().splitlines()]
MEMORY = 48 << 20
"""Bytes that looking at a repository of 40 KiB may take."""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COMMANDS = (
    ["ls", "{place}"],
    ["ls", "{place}", "--json"],
    ["show", "{place}", "--run", "main", "--step", "a0002/15"],
    ["verify", "{place}"],
    ["restore", "{place}", "{out}", "--run", "main", "--step", "a0002/15"],
)


def plant(place: Path, name: str, data: bytes) -> None:
    """Puts a file into the repository, and has the objects that vouch for it vouch for it."""
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if name == "tenuto.json":
        (place / "tenuto.copy.json").unlink()
    if name == PACK:
        vouch_for_pack(place, data)
    if name in (PACK, INDEX):
        manifest = json.loads((place / MANIFEST).read_bytes())
        del manifest["digest"]
        index = (place / INDEX).read_bytes()
        manifest["indexes"][0].update(length=len(index), digest=xxhash.xxh3_128_hexdigest(index))
        (place / MANIFEST).write_bytes(sealed(dumped(manifest)[:-1]))


def vouch_for_pack(place: Path, data: bytes) -> None:
    whole = (place / INDEX).read_bytes()
    stop = 8 + int.from_bytes(whole[:8], "little")
    fields, rest = json.loads(whole[8:stop]), whole[stop:]
    begin, end = fields["head"]["data_offsets"]
    head = json.loads(rest[begin:end])
    length = max(8, min(8 + int.from_bytes(data[:8], "little"), len(data)))
    digest = xxhash.xxh3_128_hexdigest(data[:length])
    head["packs"][0].update(length=max(8, len(data)), header=length, digest=digest)
    text = dumped(head)
    for name, field in fields.items():
        if name != "__metadata__" and field["data_offsets"][0] >= end:
            field["data_offsets"] = [at + len(text) - (end - begin) for at in field["data_offsets"]]
    fields["head"].update(shape=[len(text)], data_offsets=[begin, begin + len(text)])
    header = json.dumps(fields, separators=(",", ":")).encode()
    (place / INDEX).write_bytes(joined(header, rest[:begin] + text + rest[end:]))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "ckpts"))


def loads(place: Path) -> TenutoError | None:
    """Loads the attacked checkpoint, opens it, and makes a training's choice; the error of the first, if any."""
    refusal = None
    try:
        tenuto.load(place, step="a0002/15")
    except TenutoError as error:
        refusal = error
    for look in (lambda: tenuto.open(place, step="a0002/15"), lambda: tenuto.load(place)):
        try:
            look()
        except TenutoError as error:
            assert error.message
    return refusal


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a good repository needs is imported before an attacked one is looked at."""
    loads(Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("good") / "ckpts")))


def only_here(place: Path) -> Any:
    """Judges what is opened and imported: the repository's own files, and code by names of the code's own."""

    def allowed(event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "import":
            return str(arguments[0]).partition(".")[0] not in (
                "os.system",
                "subprocess",
                "owned",
                "posix",
                "rank-00000",
            )
        return not str(arguments[0]).startswith("/etc/passwd")

    return allowed


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack["file"])
def test_i10_a_lie_is_refused_by_name(attack: dict[str, Any], place: Path) -> None:
    plant(place, attack["object"], (HERE / "files" / attack["file"]).read_bytes())
    before = contents(place)
    tracemalloc.start()
    try:
        with recording(only_here(place)) as done:
            refusal = loads(place)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done == []
    assert peak < MEMORY
    assert (refusal is not None) == attack["refused"], refusal
    if refusal is not None:
        assert refusal.subject
        assert refusal.message
    assert contents(place) == before, "reading writes nothing"


SHOWN = [attack for number, attack in enumerate(ATTACKS) if "escape" in attack["file"] or number % 9 == 0]


@pytest.mark.parametrize("attack", SHOWN, ids=lambda attack: attack["file"])
def test_the_command_line_tells_of_it_and_of_nothing_else(
    attack: dict[str, Any], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(place, attack["object"], (HERE / "files" / attack["file"]).read_bytes())
    for command in COMMANDS:
        words = [word.format(place=place, out=tmp_path / "out.safetensors") for word in command]
        with recording(only_here(place)) as done, pytest.raises(SystemExit) as caught:
            main(words)
        told = capsys.readouterr()
        code = caught.value.code or 0
        assert [one for one in done if not one.startswith(("os.link", "os.remove", "os.rename", "os.truncate"))] == []
        assert isinstance(code, int) and code != 70, "an error of Tenuto's own, or none"
        assert "Traceback" not in told.err
        assert CONTROL.findall(told.out + told.err) == []
        if command[0] == "verify" and attack["found"]:
            assert code != 0
        (tmp_path / "out.safetensors").unlink(missing_ok=True)


def contents(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_the_files_are_what_the_generator_makes() -> None:
    made = attacks()
    assert len({file for _, file, _, _ in made}) == len(made) >= 130
    assert [(place, file, lie) for place, file, lie, _ in made] == [
        (one["object"], one["file"], one["lie"]) for one in ATTACKS
    ]
    assert all(one["found"] != one["file"].startswith(HARMLESS) for one in ATTACKS)
    assert sum(one["refused"] for one in ATTACKS) > 80
    for _, file, _, data in made:
        assert (HERE / "files" / file).read_bytes() == data, file


def test_a_planted_golden_file_loads(place: Path) -> None:
    """The planting itself refuses nothing."""
    for name in (PACK, INDEX, MANIFEST):
        plant(place, name, (GOLDEN / name).read_bytes())
    assert loads(place) is None
