"""Files of other tools, keys, settings and journals that a stranger has prepared: what is no regular file is refused,
and nobody waits for it; what a file claims takes no memory and no room before it is found to be there."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import tenuto
from tenuto.cli import main
from tenuto.errors import TenutoError

pytestmark = pytest.mark.timeout(60)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a path of a socket is short


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


COMMANDS = {
    "import": ["import", "x.safetensors", "repository"],
    "import of a named format": ["import", "x.safetensors", "repository", "--from", "safetensors"],
    "import in place": ["import", "--in-place", "x.safetensors", "elsewhere"],
    "migrate": ["migrate", "x.safetensors", "repository"],
    "diff": ["diff", "repository", "latest", "x.safetensors"],
    "export": ["export", "repository", "x.safetensors", "--force"],
    "repair": ["repair", "repository", "--from", "x.safetensors"],
    "replicate": ["replicate", "repository", "./x.safetensors"],
    "key": ["key", "add", "repository", "--key-file", "x.safetensors"],
    "signed by": ["verify", "repository", "--signed-by", "x.safetensors"],
    "journal": ["report", "repository", "--journal", "x.safetensors"],
    "settings": ["config", "show"],
}
OPENED = ("import", "export", "key", "settings")
"""One of each place that opens files."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tenuto.save({"model": {"w": np.ones(4, np.float32)}}, "repository", step=3)
    return tmp_path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one error of a command that must refuse."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    told = capsys.readouterr()
    assert caught.value.code not in (0, 70, None), told
    assert told.err.count("error:") == 1
    assert "Traceback" not in told.err
    return told.err


@pytest.mark.parametrize(
    ("command", "make"),
    [(command, pipe) for command in COMMANDS]
    + [(command, make) for command in OPENED for make in (link_to_pipe, listening, link_to_device)],
)
def test_what_is_no_regular_file_is_refused_and_left_as_it_is(
    command: str,
    make: Callable[[Path], None],
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strange = place / "x.safetensors"
    make(strange)
    before = strange.lstat()
    monkeypatch.setenv("TENUTO_CONFIG", "x.safetensors" if command == "settings" else "")
    error = refused(COMMANDS[command], capsys)
    assert "x.safetensors" in error
    assert (strange.lstat().st_ino, strange.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert tenuto.load("repository").state["model"]["w"].tolist() == [1.0] * 4


def trainers(path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(4, np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (nothing, "a.safetensors"),
        (trainers, "optimizer.pt"),
        (trainers, "rng_state.pth"),
        (trainers, "trainer_state.json"),
        (trainers, "tokenizer.json"),
        (trainers, "model.safetensors.index.json"),
        (nothing, ".metadata"),
    ],
)
def test_a_pipe_inside_a_directory_of_a_format_is_refused(
    make: Callable[[Path], None], name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "foreign").mkdir()
    make(place / "foreign")
    os.mkfifo(place / "foreign" / name)
    assert name in refused(["import", "foreign", "repository"], capsys)


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


LONG = 1 << 20
HEAVY = {
    "a long string": header(f'{{"__metadata__":{{"a":"{"x" * LONG}"}}}}'),
    "a long name": header(f'{{"{"x" * LONG}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}'),
    "a string without an end": header('{"' + "x" * LONG),
    "escapes": header(f'{{"__metadata__":{{"a":"{chr(92) + "n":s}{(chr(92) + "n") * (LONG // 2)}"}}}}'),
    "a long name twice": header(
        f'{{"{"x" * LONG}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},"{"x" * LONG}":1}}'
    ),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_header_takes_a_small_multiple_of_its_bytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HEAVY[name])
    tracemalloc.start()
    try:
        with tenuto.formats.read(path) as reader:
            assert len(reader.tree) <= 1
    except TenutoError as error:
        assert len(str(error)) < 3000, "a name of a megabyte is no message"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * len(HEAVY[name])


def test_documents_and_pickles_that_are_nothing_but_containers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.formats.safetensors._MOST_VALUES", 30_000)
    monkeypatch.setattr("tenuto.formats.pickles._CONTAINERS_ROOM", 1000)
    index = tmp_path / "x.safetensors.index.json"
    index.write_text('{"weight_map":[' + ",".join(["{}"] * 40_000) + "]}")
    archive = tmp_path / "x.pt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x04](" + b"\x8f\x94" * 40_000 + b"e.")
    for path in (index, archive):
        with pytest.raises(TenutoError, match=r"more than|more containers"):
            tenuto.formats.read(path)
    with zipfile.ZipFile(archive, "w") as file:  # the densest that a pickler writes of a training's state
        file.writestr("x/data.pkl", pickle.dumps([{"a": (n,)} for n in range(20_000)], 2))
    with tenuto.formats.read(archive) as reader:
        assert reader.tree[-1] == {"a": (19_999,)}


def zeros(path: Path, nbytes: int) -> None:
    np.savez_compressed(path, a=np.zeros(nbytes, np.uint8))


def test_a_member_claims_no_more_than_its_compression_can_hold(tmp_path: Path) -> None:
    zeros(tmp_path / "x.npz", 1 << 20)
    data = bytearray((tmp_path / "x.npz").read_bytes())
    at = data.rfind(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 1 << 31)
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(TenutoError, match=r"'a\.npy' claims 2147483648 bytes"):
        tenuto.formats.read(tmp_path / "x.npz")


def test_zeros_are_imported_in_blocks_and_only_where_they_have_room(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 16 << 20
    zeros(place / "x.npz", nbytes)
    assert (place / "x.npz").stat().st_size < nbytes // 900
    monkeypatch.setattr("tenuto.engine.save.save_writer.free_space", lambda store: (store.url, 1 << 20))
    assert "failed while asking for space" in refused(["import", "x.npz", "full"], capsys)
    assert sum(path.stat().st_size for path in (place / "full").rglob("*") if path.is_file()) < 1 << 20
    monkeypatch.undo()
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as caught:
        main(["import", "x.npz", "whole", "--json"])
    assert not caught.value.code
    assert json.loads(capsys.readouterr().out)["imported"][0]["bytes"] >= nbytes


def test_a_directory_in_an_archive_has_its_limit(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        info = zipfile.ZipInfo("a.npy")
        info.comment = bytes(60_000)
        file.writestr(info, b"")
    data = stream.getvalue()
    entry = data[data.rfind(b"PK\x01\x02") : data.rfind(b"PK\x05\x06")]
    count = (64 << 20) // len(entry) + 1
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, count * len(entry), data.rfind(b"PK\x01\x02"), 0)
    (tmp_path / "x.npz").write_bytes(data[: data.rfind(b"PK\x01\x02")] + entry * count + end)
    tracemalloc.start()
    try:
        with pytest.raises(TenutoError, match="where at most"):
            tenuto.formats.read(tmp_path / "x.npz", format="npz")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
