"""In a repository with keys nothing is acted on that no key vouches for: what somebody without a key has put there is
refused by name, and what he does there with our own commands needs the key."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.errors import KeyMissing, Tampered
from tenuto.model import canonical_json
from tenuto.policy import keep as keeping

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENUTO_KEY_FILE", "TENUTO_KEY", "TENUTO_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    from tenuto.cli import main

    def call(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def train(place: Path, last: int, sign: int = 1, **more: Any) -> None:
    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(place, state, save=every(steps=1), keep=keep.all(), log="silent", **more) as ckpt:
        for step in ckpt.steps(last):
            state["w"][:] = sign * (step + 1)
            ckpt.log(loss=10.0 - step)


class Made:
    """`place`: step 1 plain from before the key, 2 to 4 sealed. `forged`: the same steps and more, plain, with other
    values, made in a copy without `keys/`."""

    def __init__(self, root: Path, run: Run) -> None:
        self.place, self.key, self.forged = root / "ckpts", root / "tenuto.key", root / "forged"
        train(self.place, 1)
        shutil.copytree(self.place, self.forged)
        status, _, self.said = run("key", "add", self.place, "--key-file", self.key)
        assert status == 0, self.said
        train(self.place, 4, key=self.key)
        train(self.forged, 5, -1)

    def put(self, *patterns: str, source: Path | None = None) -> None:
        for pattern in patterns:
            for path in sorted((source or self.forged).glob(pattern)):
                target = self.place / path.relative_to(source or self.forged)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)

    def unlocked(self) -> Path:
        """A copy without the keys, in which anybody can use our commands."""
        copy = self.place.with_name("unlocked")
        shutil.copytree(self.place, copy)
        shutil.rmtree(copy / "keys")
        return copy

    def load(self, step: int | str = "latest") -> float:
        return float(tenuto.load(self.place, step=step, key=self.key).state["w"][0])


@pytest.fixture
def made(tmp_path: Path, run: Run) -> Made:
    return Made(tmp_path, run)


STEP = "runs/main/a0002/step-0000000"


def test_what_lay_there_before_the_first_key_counts_as_it_lay_there(made: Made, run: Run) -> None:
    assert "plain from before, and trusted as it lies there now: 1 checkpoint" in made.said
    assert [made.load(step) for step in (1, 2, 3, 4)] == [1, 2, 3, 4]
    manifest = made.place / "runs/main/a0001/step-00000001/manifest.json"
    values = canonical_json.loads(manifest.read_bytes())
    del values["digest"]
    values["progress"]["epoch"] = 7
    manifest.write_bytes(canonical_json.seal(values))
    with pytest.raises(Tampered, match="is not sealed"):
        made.load(1)
    assert made.load() == 4


@pytest.mark.parametrize("where", ["in the place of the newest", "newer"])
def test_a_plain_checkpoint_that_came_later_is_refused_by_every_reader(
    made: Made, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: Any, where: str, tmp_path: Path
) -> None:
    step = 4 if where == "in the place of the newest" else 5
    shutil.rmtree(made.place / f"{STEP}{step}", ignore_errors=True)
    made.put(f"{STEP}{step}/*")
    with pytest.raises(Tampered, match="is not sealed"):
        made.load(step)
    with pytest.raises(Tampered), tenuto.open(made.place, step=step, key=made.key):
        pass
    with pytest.raises(Tampered):
        tenuto.load(made.place, step=step)  # nor without the key
    caplog.clear()
    assert made.load() == step - 1
    assert "is not sealed" in caplog.text, "passed over, and said"
    state = {"w": np.zeros(1000)}
    copy = shutil.copytree(made.place, tmp_path / "copy")
    with tenuto.Checkpointer(copy, state, save=every(steps=9), key=made.key) as ckpt:
        caplog.clear()
        restored = ckpt.restore()
    assert "is not sealed" in caplog.text
    assert restored and (restored.step, state["w"][0]) == (step - 1, step - 1)
    for key in ("", str(made.key)):
        monkeypatch.setenv("TENUTO_KEY_FILE", key)
        status, out, err = run("verify", made.place)
        assert (status, f"{STEP}{step}/manifest.json" in out, "is not sealed" in " ".join(out.split())) == (
            12,
            True,
            True,
        )
        assert run("show", made.place, "--step", step)[0] == 12
        assert run("diff", made.place, 1, step)[0] == 12
        assert run("export", made.place, tmp_path / "out.safetensors", "--step", step)[0] == 12
        assert run("cp", made.place, step, "--to", tmp_path / "other", "--to-run", "x", "--yes")[0] != 0
        assert not (tmp_path / "out.safetensors").exists()
    status, out, err = run("key", "trust", made.place, f"main/a0002/{step}", "--yes")
    assert (status, f"{STEP}{step}/manifest.json" in err) == (0, True)
    assert made.load(step) == made.load() == -step
    assert run("verify", made.place)[0] == 0


def test_the_list_of_what_was_there_is_the_keys_own(made: Made, run: Run) -> None:
    ring = max((made.place / "keys").iterdir())
    before = ring.read_bytes()
    values = canonical_json.loads(before)
    del values["digest"]
    values["vouched"]["sha256"] = values["vouched"]["sha256"][64:]
    ring.write_bytes(canonical_json.seal(values))
    with pytest.raises(Tampered):
        made.load()
    del values["vouched"]
    ring.write_bytes(canonical_json.seal(values))
    with pytest.raises(Tampered, match="is not sealed"):
        made.load(1)
    assert made.load(2) == 2
    ring.write_bytes(before)
    assert run("key", "rotate", made.place, "--key-file", made.key, "--yes")[0] == 0
    assert run("key", "add", made.place, "--key-file", made.key.with_name("two"), "--with", made.key)[0] == 0
    assert (made.load(1), made.load(3)) == (1, 3), "what changes the slots leaves it"


@pytest.mark.parametrize("named", ["key=", "TENUTO_KEY_FILE"])
def test_with_a_key_a_repository_without_keys_is_refused(
    made: Made, run: Run, monkeypatch: pytest.MonkeyPatch, named: str, tmp_path: Path
) -> None:
    """Somebody has removed `keys/`, or says that they were destroyed, and put plain checkpoints in place of all."""
    given = {"key": made.key} if named == "key=" else {}
    if not given:
        monkeypatch.setenv("TENUTO_KEY_FILE", str(made.key))
    for keys in ("removed", "destroyed"):
        ring = max((made.forged.parent / "ckpts/keys").iterdir(), default=None) if keys == "destroyed" else None
        if ring is not None:
            values = canonical_json.loads(ring.read_bytes())
            del values["digest"], values["vouched"]
            values.update(slots=[], older={})
            (made.forged / "keys").mkdir()
            (made.forged / "keys/1.json").write_bytes(canonical_json.seal(values))
        with pytest.raises(KeyMissing, match=r"has no keys|were destroyed"):
            tenuto.load(made.forged, **given)
        with pytest.raises(KeyMissing):
            tenuto.Checkpointer(made.forged, {"w": np.zeros(1000)}, **given)
        with pytest.raises(KeyMissing):
            tenuto.Repository(made.forged, **given)
        if not given:
            for words in (("export", made.forged, tmp_path / "x.safetensors"), ("verify", made.forged)):
                status, _, err = run(*words)
                assert (status, "keys" in err) == (KeyMissing.exit_code, True), words


def test_a_forged_tag_leads_nowhere_and_one_put_with_the_key_does(made: Made, run: Run) -> None:
    tenuto.Repository(made.place, key=made.key).tag("prod", 3)
    copy = made.unlocked()
    assert run("tag", copy, "prod", "--step", 2)[0] == 0
    made.put("refs/tag/prod/2.json", source=copy)
    with pytest.raises(Tampered, match=r"refs/tag/prod/2\.json"):
        made.load("prod")
    status, out, _ = run("verify", made.place)
    assert (status, "refs/tag/prod/2.json" in out) == (12, True)
    shutil.copy(made.place / "refs/tag/prod/1.json", made.place / "refs/tag/prod/3.json")  # a genuine one, moved
    with pytest.raises(Tampered, match=r"refs/tag/prod/2\.json"):
        made.load("prod")
    tenuto.Repository(made.place, key=made.key).tag("prod", 4)
    assert made.load("prod") == 4


def test_forged_notes_count_for_nothing(made: Made, run: Run) -> None:
    copy = made.unlocked()
    assert run("note", copy, 2, "--metric", "loss=-5")[0] == 0
    assert run("verify", copy, "--step", 2, "--note")[0] == 0
    made.put(f"{STEP}2/notes/*", source=copy)
    assert made.load("best:loss:min") == 4
    repository = tenuto.Repository(made.place, key=made.key)
    assert tenuto.load(made.place, step=2, key=made.key).metrics["loss"] == 9.0
    plan = repository.find("main", 2)
    assert {one.kind for one in repository.notes(plan)} == {"unreadable"}
    status, out, _ = run("verify", made.place)
    assert (status, f"{STEP}2/notes/1.json" in out) == (12, True)
    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(
        made.place, state, save=every(steps=1), keep=keeping.best(1, "loss", mode="min"), key=made.key, log="silent"
    ) as ckpt:
        for _ in ckpt.steps(6):
            ckpt.log(loss=20.0)
    assert (made.place / f"{STEP}2/manifest.json").exists(), "what cannot be judged stays"
    assert (made.place / f"{STEP}4/manifest.json").exists(), "it is the best by the metrics of who has the key"
    assert not (made.place / f"{STEP}3/manifest.json").exists()


def test_a_forged_rollback_is_none(made: Made, run: Run, caplog: Any) -> None:
    copy = made.unlocked()
    assert run("rollback", copy, "2")[0] == 0
    made.put("runs/main/a0003/**/*.json", source=copy)
    caplog.clear()
    assert tenuto.load(made.place, key=made.key).step == 4
    assert "a0003/attempt.json is not sealed" in caplog.text


def test_a_command_without_the_key_says_that_it_needs_it_and_puts_nothing(made: Made, run: Run, tmp_path: Path) -> None:
    def objects() -> set[Path]:
        return {path for path in made.place.rglob("*") if path.is_file()}

    before = objects()
    for words in (
        ("tag", made.place, "prod", "--step", 2),
        ("pin", made.place, 2),
        ("note", made.place, 2, "a text"),
        ("rollback", made.place, 2),
        ("fork", made.place, 2, "warm"),
        ("keep", made.place, "--latest", 1, "--yes"),
        ("verify", made.place, "--note"),
        ("drill", made.place),
        ("key", "trust", made.place, "--yes"),
    ):
        status, out, err = run(*words)
        said = " ".join(err.split())
        assert (status, "no key was given" in said, "TENUTO_KEY_FILE" in said) == (26, True, True), words
        assert "not what was saved" not in out + err
        assert objects() == before, words
    for words in (("ls", made.place), ("log", made.place), ("verify", made.place), ("gc", made.place, "--dry-run")):
        assert run(*words)[0] == 0, words


def test_views_say_what_is_sealed_and_only_where_there_are_keys(made: Made, run: Run) -> None:
    made.put(f"{STEP}5/*")
    rows = {int(step): marks for step, marks in re.findall(r"^ +a000\d +(\d+) (.*)$", run("ls", made.place)[1], re.M)}
    assert ["sealed" in rows[step] for step in (1, 2, 3, 4, 5)] == [False, True, True, True, False]
    assert ("plain" in rows[1], "NOT VOUCHED FOR" in rows[5]) == (True, True)
    found = json.loads(run("ls", made.place, "--json")[1])["runs"][0]["checkpoints"]
    assert {row["step"]: row["sealed"] for row in found} == {
        **dict.fromkeys((2, 3, 4), "sealed"),
        1: "plain",
        5: "refused",
    }
    assert "sealed" in run("show", made.place, "--step", 2)[1].splitlines()[0]
    assert "plain" in run("show", made.place, "--step", 1)[1].splitlines()[0]
    said = run("key", "ls", made.place)[1]
    assert "checkpoints: 3 sealed, 1 plain, 1 NOT VOUCHED FOR" in said
    out = run("ls", made.forged)[1]
    assert "sealed" not in out and "plain" not in out


def test_another_first_key_after_the_last_one_was_destroyed_vouches_for_what_is_there(made: Made, run: Run) -> None:
    slot = json.loads(run("key", "ls", made.place, "--json")[1])["slots"][0]["id"]
    assert run("key", "rm", made.place, "--slot", slot, "--yes")[0] == 0
    assert tenuto.load(made.place, step=1).step == 1
    assert run("key", "add", made.place, "--key-file", made.key)[0] == 0
    train(made.place, 6, key=made.key, run="fresh")
    assert made.load(1) == 1
    assert tenuto.load(made.place, run="fresh", key=made.key).step == 6


def test_certify_runs_a_script_that_seals(made: Made, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, tenuto\n"
        "state = {'w': np.zeros(10)}\n"
        f"with tenuto.Checkpointer({str(made.place)!r}, state, save=tenuto.every(steps=1), run='new',\n"
        f"                         key={str(made.key)!r}) as ckpt:\n"
        "    for step in ckpt.steps(3):\n"
        "        state['w'] += 1\n"
    )
    command = [sys.executable, "-m", "tenuto", "certify", str(made.place), "--steps", "1", "--more", "1", "--"]
    ended = subprocess.run([*command, sys.executable, str(script)], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
