"""Writes the golden repository of format 1 and its damaged variants. Run once, by the release that defines the format:

    python tests/golden/make_v1.py

The files are never regenerated: every later version has to read them as they are. It refuses to run where they exist.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tenuto.concurrency import process
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.maintenance import remove
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Owner
from tenuto.repo import tombstones
from tenuto.repo.commit import begin
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim
from tenuto.repo.refs import clear_ref, put_ref
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort
from tenuto.state.encode.flattener import flatten
from tenuto.store.registry import open_store

HERE = Path(__file__).parent / "1"
OWNER = Owner("golden", "boot", "pid:[1]", 1234, "5678", "nobody")
STEP = "runs/main/a0001/step-00000010"


def state(step: int) -> dict[str, Any]:
    """What is saved at `step`; the test that reads it spells the same values out."""
    shared = np.arange(6, dtype=np.float32).reshape(2, 3) + step
    weight = torch.arange(600, dtype=torch.float32).reshape(20, 30) * 0.5 + step
    return {
        "plain": {
            "none": None,
            "true": True,
            "int": step,
            "big": 2**80,
            "float": 0.1,
            "negative zero": -0.0,
            "nan": float("nan"),
            "inf": float("-inf"),
            "text": "Grüße, \U0001f600 and a \x00",
            "bytes": b"\x00\xff",
            "complex": 1 - 2j,
            "list": [1, 2.0, "three", [None]],
            "tuple": (1, (2,)),
            "set": {3, 1, 2},
            7: "a key that is no string",
            "moment": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        },
        "numpy": {
            **{
                name: np.array([0, 1, 2, 100], dtype=name)
                for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
            },
            **{name: np.array([0.0, -1.5, 2.25], dtype=name) for name in ("float16", "float32", "float64")},
            "complex64": np.array([1 + 2j], dtype="complex64"),
            "bool": np.array([True, False]),
            "no dimension": np.array(3.5),
            "no element": np.zeros((0, 4), np.float32),
            "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
            "shared": shared,
            "shared too": shared,
        },
        "torch": {
            "weight": weight,
            "tied": weight,
            "bfloat16": torch.tensor([1.0, -2.0, 3.5], dtype=torch.bfloat16),
            "float8": torch.tensor([1.0, -2.0], dtype=torch.float8_e4m3fn),
            "flags": torch.tensor([[True], [False]]),
            "scalar": torch.tensor(7),
        },
        "odd/~@# path": np.array([step]),
    }


def write(repo: Repo, attempt: claim.Attempt, step: int, *, loss: float) -> CheckpointId:
    saver = Saver(repo, attempt.run)
    saver.attempt = attempt
    try:
        about = ManifestDetails(
            parent=attempt.parent,
            metrics={"loss": loss, "odd": float("nan")},
            progress={"step": step, "epoch": 1, "batch": 3},
            environment={"tenuto": "0.1"},
            certificate={"exact": True},
        )
        return saver.save(flatten(state(step)), step, wait=True, about=about).wait()
    finally:
        saver.close()


def make(where: Path) -> None:
    for module in (claim, process, tombstones):
        module.this_process = lambda: OWNER  # type: ignore[attr-defined]
    repo = Repo.create_or_open(open_store(where), chunk_bytes=1024)
    first = claim.claim(repo, "Main", None)
    removed = write(repo, first, 5, loss=3.0)
    ten = write(repo, first, 10, loss=2.0)
    twenty = write(repo, first, 20, loss=1.0)
    failed = begin(first, 25, "0" * 32, ["rank-00000.safetensors", "rank-00000.index"])
    abort(repo, failed, "0" * 32)
    first.release()
    add_note(repo, ten, "metric", {"val_loss": 0.25})
    add_note(repo, ten, "verified", {"every_byte": True})
    put_ref(repo, "pin", "paper", ten)
    put_ref(repo, "tag", "gone", twenty)
    clear_ref(repo, "tag", "gone")
    second = claim.claim(repo, "main", ten)
    write(repo, second, 15, loss=1.5)
    second.release()
    fork = claim.claim(repo, "fork", twenty)
    write(repo, fork, 21, loss=0.5)
    fork.release()
    remove.execute(repo, remove.plan_remove(repo, [removed]))


def resealed(path: Path, **changes: Any) -> str:
    values = json.loads(path.read_bytes())
    del values["digest"]
    return base64.b64encode(canonical_json.seal({**values, **changes})).decode()


def variants(where: Path) -> dict[str, tuple[list[dict[str, Any]], str]]:
    """Name to changes, and the error that loading step 10 of run main must raise (empty: it must load)."""
    pack, index = f"{STEP}/rank-00000.safetensors", f"{STEP}/rank-00000.index"
    manifest, note = f"{STEP}/manifest.json", f"{STEP}/notes/1.json"
    other = STEP.replace("10", "20")
    size = (where / pack).stat().st_size
    encoded = lambda name: base64.b64encode((where / name).read_bytes()).decode()  # noqa: E731
    new = {"format": 3}
    return {
        "critical_pack_bit": ([{"object": pack, "flip": [size - 700, 3]}], "CorruptionError"),
        "critical_pack_last_bit": ([{"object": pack, "flip": [size - 1, 7]}], "CorruptionError"),
        "critical_pack_header": ([{"object": pack, "flip": [100, 0]}], "CorruptionError"),
        "critical_pack_header_padding": ([{"object": pack, "flip": [4090, 0]}], "CorruptionError"),
        "critical_pack_cut": ([{"object": pack, "cut": size - 1}], "CorruptionError"),
        "critical_pack_longer": ([{"object": pack, "append": "AA=="}], "CorruptionError"),
        "critical_pack_missing": ([{"object": pack, "delete": True}], "CorruptionError"),
        "critical_pack_of_another_step": (
            [{"object": pack, "put": encoded(f"{other}/{Path(pack).name}")}],
            "CorruptionError",
        ),
        "critical_index_bit": ([{"object": index, "flip": [900, 5]}], "CorruptionError"),
        "critical_index_missing": ([{"object": index, "delete": True}], "CorruptionError"),
        "critical_index_of_another_step": (
            [{"object": index, "put": encoded(f"{other}/{Path(index).name}")}],
            "CorruptionError",
        ),
        "critical_manifest_bit": ([{"object": manifest, "flip": [200, 1]}], "CorruptionError"),
        "critical_manifest_cut": ([{"object": manifest, "cut": 500}], "CorruptionError"),
        "critical_manifest_of_another_step": (
            [{"object": manifest, "put": encoded(f"{other}/manifest.json")}],
            "CorruptionError",
        ),
        "critical_manifest_of_a_newer_format": (
            [{"object": manifest, "put": resealed(where / manifest, **new)}],
            "FormatTooNew",
        ),
        "critical_repository_of_a_newer_format": (
            [{"object": "tenuto.json", "put": resealed(where / "tenuto.json", **new)}],
            "FormatTooNew",
        ),
        "critical_repository_bit": (
            [{"object": "tenuto.json", "flip": [20, 0]}, {"object": "tenuto.copy.json", "flip": [30, 2]}],
            "CorruptionError",
        ),
        "critical_manifest_of_another_repository": (
            [{"object": manifest, "put": resealed(where / manifest, repository="0" * 32)}],
            "CorruptionError",
        ),
        "benign_unknown_fields": (
            [
                {"object": manifest, "put": resealed(where / manifest, later="a field of a later version")},
                {"object": "tenuto.json", "put": resealed(where / "tenuto.json", later=1)},
            ],
            "",
        ),
        "benign_repository_bit": ([{"object": "tenuto.json", "flip": [20, 0]}], ""),
        "benign_repository_copy_missing": ([{"object": "tenuto.copy.json", "delete": True}], ""),
        "benign_note_damaged": ([{"object": note, "flip": [30, 0]}], ""),
        "benign_note_of_an_unknown_kind": ([{"object": note, "put": resealed(where / note, note="later")}], ""),
        "benign_begin_missing": ([{"object": f"{STEP}/begin.json", "delete": True}], ""),
        "benign_attempt_damaged": ([{"object": "runs/main/a0002/attempt.json", "flip": [40, 0]}], ""),
        "benign_ref_damaged": ([{"object": "refs/pin/paper/1.json", "flip": [40, 0]}], ""),
        "benign_another_step_damaged": ([{"object": f"{other}/manifest.json", "flip": [40, 0]}], ""),
        "benign_strangers": (
            [
                {"object": f"{STEP}/mine.txt", "put": "AA=="},
                {"object": "runs/main/a0003/README", "put": "AA=="},
                {"object": f"{STEP}/rank-00000.safetensors.tmp-{'1' * 32}", "put": "AA=="},
                {"object": "runs/main/a0001/step-00000099/manifest.json", "put": encoded(manifest)},
            ],
            "",
        ),
    }


def main() -> None:
    if HERE.exists():
        sys.exit(f"{HERE} exists: golden files are never regenerated")
    make(HERE / "repository")
    try:
        for name, (changes, error) in variants(HERE / "repository").items():
            recipe = {"changes": changes, "error": error}
            (HERE / f"{name}.json").write_text(json.dumps(recipe, indent=1) + "\n")
        (HERE / ".gitattributes").write_text("* -text\n")
    except BaseException:
        shutil.rmtree(HERE)
        raise


if __name__ == "__main__":
    main()
