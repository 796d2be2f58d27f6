"""Every error of the tree, raised by the product where a user would meet it, with its message and its hint.

A class that has no case here fails the last test: what cannot be raised is no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from support.tiny_training import Gate, flip, flip_leaf, state
from tenuto import errors, every, keep
from tenuto.errors import TenutoWarning
from tenuto.model import canonical_json
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Settings
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.repo.ownership import claim
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.registry import open_store

Raising = Callable[[Path, pytest.MonkeyPatch], object]
CASES: dict[str, tuple[Raising, str, str]] = {}
GROUPS = {errors.TenutoError, errors.OwnershipError, errors.RanksError}
"""Only to be caught by: their subclasses are raised."""


def case(kind: type[errors.TenutoError], message: str, hint: str = "") -> Callable[[Raising], Raising]:
    """Registers how `kind` is raised; `message` and `hint` are searched for in what it says."""

    def register(raising: Raising) -> Raising:
        CASES[kind.__name__] = (raising, message, hint)
        return raising

    return register


def trained(place: Path, steps: int = 3, **more: Any) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=1), keep=keep.all(), **more) as ckpt:
        for step in ckpt.steps(steps):
            ckpt.log(loss=1 / (step + 1))


# -- what was asked for ---------------------------------------------------------------


@case(errors.UsageError, r"every\(steps=0\) would never", r"every\(steps=")
def a_policy_that_never_saves(place: Path, patch: pytest.MonkeyPatch) -> object:
    return every(steps=0)


@case(errors.BadIndex, "w: index 1000 is out of range: dimension 0 has 1000")
def an_index_beyond_the_end(place: Path, patch: pytest.MonkeyPatch) -> object:
    tenuto.save(state(), place)
    with tenuto.open(place) as opened:
        return opened["w"][1000]


@case(errors.MetricNotLogged, "'accuracy', which nothing has logged", r"ckpt.log\(accuracy=")
def a_metric_that_is_never_logged(place: Path, patch: pytest.MonkeyPatch) -> object:
    """Training is not ended for it: it is told as a warning, in the words of the error."""
    with pytest.warns(TenutoWarning, match="nothing has logged") as told:
        with tenuto.Checkpointer(place, state(), save=every(steps=1), keep=keep.best(1, "accuracy")) as ckpt:
            for _ in ckpt.steps(1):
                pass
    message, _, hint = str(told[0].message).partition("\n  hint: ")
    raise errors.MetricNotLogged(message, hint=hint)


@case(errors.PolicyConflict, "save_top_k=3", "")
def names_that_contradict_each_other(place: Path, patch: pytest.MonkeyPatch) -> object:
    return tenuto.Checkpointer(place, {}, save_top_k=3, monitor="loss", keep=keep.latest(1))


@case(errors.RanksNotSupported, "4 processes", "init_process_group")
def more_than_one_rank(place: Path, patch: pytest.MonkeyPatch) -> object:
    patch.setenv("WORLD_SIZE", "4")
    return tenuto.Checkpointer(place, state())


@case(errors.ForkedProcess, "forked child", "build another one")
def a_forked_child_that_saves(place: Path, patch: pytest.MonkeyPatch) -> object:
    with tenuto.Checkpointer(place, state()) as ckpt:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                ckpt.save()
            except errors.ForkedProcess as error:
                os.write(write, f"{error.message}\n{error.hint}".encode())
            os._exit(0)
        os.close(write)
        message, _, hint = os.read(read, 4096).decode().partition("\n")
        os.close(read)
        os.waitpid(child, 0)
    raise errors.ForkedProcess(message, hint=hint)


@case(errors.MissingExtra, "needs torch", r"pip install '\.\[torch\]'")
def a_pt_file_without_torch(place: Path, patch: pytest.MonkeyPatch) -> object:
    from tenuto.cli.commands.export import export

    tenuto.save(state(), place)
    for name in [name for name in sys.modules if name.startswith("tenuto.integrations.torch")]:
        patch.delitem(sys.modules, name)  # what another test may have loaded with torch
    patch.setitem(sys.modules, "torch", None)
    return export(None, str(place), place.parent / "out.pt")  # type: ignore[arg-type]


@case(errors.UnsupportedPlatform, "win32|Windows", "")
def another_operating_system(place: Path, patch: pytest.MonkeyPatch) -> object:
    patch.setattr(sys, "platform", "win32")
    return tenuto.save(state(), place)


# -- the state ---------------------------------------------------------------


@case(errors.StateError, "holds what is not a plain value", r"opened\['w'\]|tenuto.load")
def a_tensor_as_a_plain_value(place: Path, patch: pytest.MonkeyPatch) -> object:
    tenuto.save(state(), place)
    with tenuto.open(place) as opened:
        return opened.plain()


@case(errors.Unserialisable, "hooks/after", "")
def a_function_in_the_state(place: Path, patch: pytest.MonkeyPatch) -> object:
    return tenuto.save({"hooks": {"after": lambda: None}}, place)


@case(errors.DuplicatePath, "two leaves lie at a/", "rename one")
def two_leaves_under_one_path(place: Path, patch: pytest.MonkeyPatch) -> object:
    return tenuto.save({"a": {float("nan"): np.ones(1), float("nan"): np.ones(1)}}, place)


@case(errors.StateMismatch, r"w.*1000.*10|w.*10.*1000", "")
def another_shape(place: Path, patch: pytest.MonkeyPatch) -> object:
    tenuto.save(state(), place)
    return tenuto.load(place, into={**state(), "w": np.zeros(10, np.float32)})


@case(errors.ShardMismatch, r"model/w: item \[3\] .* is missing; .*ranks 0-1", "one rank at least")
def a_shard_that_no_rank_holds(place: Path, patch: pytest.MonkeyPatch) -> object:
    from tenuto.model.leaf import Box
    from tenuto.sharding.coverage import check_coverage
    from tenuto.sharding.holdings import gather, shards
    from tenuto.sharding.write_plan import assign, written

    said = [shards([0], [Box((low,), (length,))], [(4,)], [("float32", 4)]) for low, length in ((0, 2), (2, 1))]
    held = gather(said, leaves=1, paths=["model/w"])
    return check_coverage(written(held, assign(held, world_size=2)))


# -- the repository ---------------------------------------------------------------


@case(errors.RepositoryError, "is not removed", "tenuto verify")
def an_undelete_of_what_is_there(place: Path, patch: pytest.MonkeyPatch) -> object:
    from tenuto.maintenance.undelete import plan_undelete

    checkpoint = tenuto.save(state(), place)
    return plan_undelete(Repo.open(open_store(place)), checkpoint.id)


@case(errors.NotARepository, "no Tenuto repository at", "there is one at")
def the_directory_above(place: Path, patch: pytest.MonkeyPatch) -> object:
    tenuto.save(state(), place)
    return tenuto.load(place.parent)


@case(errors.FormatTooNew, "has format 2", "the Tenuto that wrote it")
def a_newer_format(place: Path, patch: pytest.MonkeyPatch) -> object:
    import json

    tenuto.save(state(), place)
    values = json.loads((place / "tenuto.json").read_bytes())
    del values["digest"]
    (place / "tenuto.json").write_bytes(canonical_json.seal({**values, "format": 2}))
    return tenuto.load(place)


@case(errors.RunNotFound, "no run 'gtp'.*main", "tenuto ls|run=")
def a_run_that_is_not_there(place: Path, patch: pytest.MonkeyPatch) -> object:
    tenuto.save(state(), place)
    return tenuto.load(place, run="gtp")


@case(errors.CheckpointNotFound, "no checkpoint of step 7; the nearest", "tenuto ls")
def a_step_that_is_not_there(place: Path, patch: pytest.MonkeyPatch) -> object:
    trained(place)
    return tenuto.load(place, step=7)


@case(errors.LeafNotFound, "has nothing at 'weight'", "tenuto show")
def a_leaf_that_is_not_there(place: Path, patch: pytest.MonkeyPatch) -> object:
    tenuto.save(state(), place)
    with tenuto.open(place) as opened:
        return opened["weight"]


@case(errors.NothingRestorable, "none of them is whole", "tenuto verify")
def nothing_whole(place: Path, patch: pytest.MonkeyPatch) -> object:
    trained(place)
    flip_leaf(place, "runs/*/*/*/rank-*.safetensors", "w")
    return tenuto.load(place)


@case(errors.CopyDiverged, "has another runs/main/a0001/attempt.json than", "to keep both, copy into an empty place")
def a_copy_of_what_went_on_differently(place: Path, patch: pytest.MonkeyPatch) -> object:
    """The same attempt was claimed by another process: the repository was set back before it."""
    trained(place)
    copy, claim_name = place.with_name("copy"), "runs/main/a0001/attempt.json"
    tenuto.Repository(place).replicate(copy)
    values = canonical_json.open_seal((copy / claim_name).read_bytes(), name=claim_name)
    values.pop("digest", None)
    (copy / claim_name).write_bytes(canonical_json.seal({**values, "id": "0" * 32}))
    next((copy / "runs/main/a0001").glob("step-*/manifest.json")).unlink()
    raise tenuto.Repository(place).replicate(copy).failed[0]


@case(errors.RemovalRefused, "`latest` means|latest", "")
def removing_the_latest(place: Path, patch: pytest.MonkeyPatch) -> object:
    from tenuto.maintenance.remove import execute, plan_remove

    checkpoint = tenuto.save(state(), place)
    repo = Repo.open(open_store(place))
    return execute(repo, plan_remove(repo, [checkpoint.id]))


@case(errors.CorruptionError, "w.*rank-00000.safetensors.*offset", "tenuto verify")
def a_flipped_bit(place: Path, patch: pytest.MonkeyPatch) -> object:
    checkpoint = tenuto.save(state(), place)
    flip(place, "runs/*/*/*/rank-*.safetensors", -1)
    return tenuto.load(place, step=checkpoint.step)


# -- keys -------------------------------------------------------------------------


def sealed(place: Path, patch: pytest.MonkeyPatch) -> Path:
    """Returns the key file of a new repository with one sealed checkpoint."""
    from tenuto.cli.commands.key import Action, key

    for name in ("TENUTO_KEY_FILE", "TENUTO_KEY", "TENUTO_PASSPHRASE"):
        patch.delenv(name, raising=False)
    tenuto.save(state(), place, step=1)
    file = place.with_name("key")
    key(Action.add, str(place), key_file=[str(file)])
    tenuto.save(state(), place, step=2, key=file)
    return file


@case(errors.KeyMissing, "no key was given that fits its slots", "TENUTO_KEY_FILE")
def a_save_without_the_key(place: Path, patch: pytest.MonkeyPatch) -> object:
    sealed(place, patch)
    return tenuto.save(state(), place, step=3)


@case(errors.WrongKey, "opens none of the slots", "tenuto key ls")
def another_key(place: Path, patch: pytest.MonkeyPatch) -> object:
    from tenuto.seal.secret_sources import make_file

    sealed(place, patch)
    make_file(place.with_name("other"))
    return tenuto.load(place, key=place.with_name("other"))


@case(errors.Tampered, "manifest.json is not what a holder of the repository's key has put there")
def an_altered_manifest(place: Path, patch: pytest.MonkeyPatch) -> object:
    file = sealed(place, patch)
    name = "runs/main/a0001/step-00000002/manifest.json"
    values = canonical_json.open_seal((place / name).read_bytes(), name=name)
    values.pop("digest", None)
    (place / name).write_bytes(canonical_json.seal({**values, "metrics": {"loss": 0.0}}))
    return tenuto.load(place, step=2, key=file)


# -- owners and saves ---------------------------------------------------------------


@case(errors.RunInUse, "process|owns|live", "takeover|run=")
def a_run_that_another_process_trains(place: Path, patch: pytest.MonkeyPatch) -> object:
    patch.setattr(claim, "DYING_S", 0.2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        ckpt = tenuto.Checkpointer(place, state())
        for _ in ckpt.steps(2):
            os.write(write, b"!")
            signal.pause()
        os._exit(0)
    try:
        os.read(read, 1)
        with tenuto.Checkpointer(place, state()) as ckpt:
            return list(ckpt.steps(2))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


@case(errors.Superseded, "claimed", "")
def a_run_that_another_process_takes_over(place: Path, patch: pytest.MonkeyPatch) -> object:
    patch.setattr(claim, "DYING_S", 0.2)
    ckpt = tenuto.Checkpointer(place, state())
    try:
        for _ in ckpt.steps(3):
            child = os.fork()
            if child == 0:
                with tenuto.Checkpointer(place, state(), takeover=True) as other:
                    next(other.steps(3))
                    os._exit(0)
            os.waitpid(child, 0)
            ckpt.save(wait=True)
    finally:
        ckpt.close()
    return None


@case(errors.SaveFailed, "save of main/a0001/1.*", "")
def a_save_that_fails(place: Path, patch: pytest.MonkeyPatch) -> object:
    gate = Gate(open_store(place))
    gate.failure, gate.failures = errors.StoreError("the disk is on fire"), 1
    with said("on fire"):
        with tenuto.Checkpointer(gate, state()) as ckpt:
            ckpt.step_done()
            try:
                return ckpt.save(wait=True)
            finally:
                ckpt.step_done()
                ckpt.save(wait=True)  # else this process would leave with a status that tells of it


@case(errors.SaveTorn, "torn at model/.*: it was changed in place", r"ckpt.fence\(\)")
def a_fenced_save_that_something_writes_into(place: Path, patch: pytest.MonkeyPatch) -> object:
    import torch

    from support.fenced_training import Model, Told, spying, stepping
    from tenuto.integrations.torch.device import HostCopies

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    copy = HostCopies.copy

    def disturbed(self: HostCopies, number: int) -> None:
        if number == 3:
            self._parts[number][0].detach().mul_(1)
        copy(self, number)

    with (
        spying(Told()),
        tenuto.Checkpointer(place, {"model": model, "optimizer": optimizer}, capture="fenced") as ckpt,
    ):
        for step in range(4):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            if step == 3:
                patch.setattr(HostCopies, "copy", disturbed)
            save = ckpt.save()
            with said("torn") if step == 3 else contextlib.nullcontext():
                save.join()
                ckpt._training.saving.saver.join(60)  # type: ignore[union-attr]
        stepping(model, optimizer)(4)
        with pytest.warns(TenutoWarning, match="captured eagerly from now on"):
            ckpt.step_done()  # an eager save takes its place
        return save.wait()


@case(errors.ScriptFailed, "nowhere-to-be-found could not be started", "tenuto certify")
def a_command_that_is_none(place: Path, patch: pytest.MonkeyPatch) -> object:
    from tenuto.certify.runner import launch

    return launch(["nowhere-to-be-found"], {}, place.parent / "log")


@case(errors.DeadlineExceeded, "has not ended within 0.01 s", "look at the store")
def a_save_that_takes_too_long(place: Path, patch: pytest.MonkeyPatch) -> object:
    gate = Gate(open_store(place))
    with tenuto.Checkpointer(gate, state()) as ckpt:
        gate.open_gate.clear()
        ckpt.step_done()
        save = ckpt.save()
        try:
            return save.wait(timeout=0.01)
        finally:
            gate.open_gate.set()


# -- ranks ---------------------------------------------------------------


def meeting(kv_store: Any, rank: int, **facts: str) -> Agreement:
    settings = Settings(beat_s=0.01, dead_after_s=30, answer_s=1, probe_s=0.05)
    return Agreement.open(ThreadRanks(rank, 2, kv_store), facts, 10 if facts else 0.1, settings)


@case(errors.RanksMissing, "handshake: rank 0 waited 0.1 s for rank 1, which has not come", "all processes")
def a_rank_that_never_comes(place: Path, patch: pytest.MonkeyPatch) -> object:
    return meeting(InProcessKVStore(), 0)


@case(errors.RankFailed, r"save 0: rank 1 has failed: ValueError: no such file \(told by rank 1\)", "log of rank 1")
def another_rank_that_fails(place: Path, patch: pytest.MonkeyPatch) -> object:
    kv_store = InProcessKVStore()

    def other() -> None:
        with pytest.raises(ValueError), meeting(kv_store, 1, run="main") as ranks, ranks.round("save"):
            raise ValueError("no such file")

    thread = threading.Thread(target=other)
    thread.start()
    with meeting(kv_store, 0, run="main") as ranks, ranks.round("save") as round:
        thread.join()
        return round.gather(10)


@case(errors.RanksDisagree, "run is 'main' on rank 0 .* and 'other' on rank 1", "same arguments")
def two_ranks_of_two_runs(place: Path, patch: pytest.MonkeyPatch) -> object:
    kv_store = InProcessKVStore()

    def other() -> None:
        with pytest.raises(errors.RanksDisagree, match="run is 'main' on rank 0"):
            meeting(kv_store, 1, run="other")

    thread = threading.Thread(target=other)
    thread.start()
    try:
        return meeting(kv_store, 0, run="main")
    finally:
        thread.join()


@case(errors.RankStoreLost, "handshake: the directory .* fails: .*(exists|directory)", "look at the directory")
def a_meeting_place_that_is_none(place: Path, patch: pytest.MonkeyPatch) -> object:
    place.write_bytes(b"")
    settings = Settings(answer_s=0.1)
    return Agreement.open(tenuto.SharedFiles(place, rank=0, world_size=2), {}, 0.1, settings)


# -- stores ---------------------------------------------------------------


class Failing(OperatingSystem):
    """The real file system, of which one call fails."""

    def __init__(self, method: str, number: int) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise OSError(number, os.strerror(number), str(arguments[0]))

        setattr(self, method, fail)


def put(place: Path, method: str = "", number: int = 0) -> Store:
    store = LocalStore(place, filesystem=Failing(method, number) if method else None)
    store.put_if_absent("runs/x", Bytes(b"1"), token="t0")
    return store


@case(errors.StoreError, "cannot name an object")
def a_name_that_leads_out(place: Path, patch: pytest.MonkeyPatch) -> object:
    return LocalStore(place).put_if_absent("../out", Bytes(b"1"), token="t0")


@case(errors.AlreadyExists, "runs/x exists already")
def a_second_put(place: Path, patch: pytest.MonkeyPatch) -> object:
    return put(place).put_if_absent("runs/x", Bytes(b"2"), token="t1")


@case(errors.ObjectNotFound, "no object runs/y")
def an_object_that_is_not_there(place: Path, patch: pytest.MonkeyPatch) -> object:
    return put(place).get("runs/y", limit=10)


@case(errors.StoreFull, "space", "")
def a_full_disk(place: Path, patch: pytest.MonkeyPatch) -> object:
    return put(place, "create", errno.ENOSPC)


@case(errors.StoreDenied, "[Pp]ermission", "")
def a_place_that_may_not_be_written(place: Path, patch: pytest.MonkeyPatch) -> object:
    return put(place, "create", errno.EACCES)


@case(errors.StoreUnreliable, "flush|sync", "")
def a_flush_that_fails(place: Path, patch: pytest.MonkeyPatch) -> object:
    return put(place, "fsync", errno.EIO)


@case(errors.StoreUnavailable, "passing fault", "")
def a_stale_handle(place: Path, patch: pytest.MonkeyPatch) -> object:
    return put(place, "create", errno.ESTALE)


def tree(kind: type[errors.TenutoError]) -> Iterator[type[errors.TenutoError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from tree(below)


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_raised_and_says_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising, message, hint = CASES[name]
    with pytest.raises(errors.TenutoError) as caught:
        raising(tmp_path / "checkpoints", monkeypatch)
    error = caught.value
    assert type(error).__name__ == name
    assert re.search(message, error.message, re.S), error.message
    assert error.message[0] == error.message[0].strip() and not error.message.endswith(".")
    if hint:
        assert error.hint is not None and re.search(hint, error.hint), error.hint
        assert str(error) == f"{error.message}\n  hint: {error.hint}"


def test_every_class_of_the_tree_is_drawn_and_has_a_case() -> None:
    kinds = set(tree(errors.TenutoError))
    assert {kind.__name__ for kind in kinds - GROUPS} == set(CASES)
    assert errors.__doc__ is not None
    assert {kind.__name__ for kind in kinds} == set(
        re.findall(r"^[│├└─\s]*([A-Z]\w+)(?: \(\w+\))?(?:  |$)", errors.__doc__, re.M)
    )


def test_a_domain_error_is_also_the_builtin_that_a_caller_would_catch() -> None:
    assert errors.__doc__ is not None
    for name, builtin in re.findall(r"([A-Z]\w+) \(([A-Z]\w+)\)", errors.__doc__):
        assert issubclass(getattr(errors, name), __builtins__[builtin])  # type: ignore[index]
