"""`save_checkpoint` and `load_checkpoint` of a DeepSpeedEngine, for scripts as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from tenuto.errors import UsageError
from tenuto.integrations.attached import NEVER, Attached, refuse_decided
from tenuto.integrations.deepspeed.engine_state import state
from tenuto.state.declarations import first_rank
from tenuto.store.contract import Where
from tenuto.training.checkpointer import Checkpointer

_OURS: Final = {
    "save": "the script's calls of save_checkpoint say when to save",
    "resume_from": "the script's call of load_checkpoint says where to resume",
    "state": "what the engine holds is its state",
}
_OWN_TAG: Final = re.compile(r"global_step(\d+)")
"""DeepSpeed's name of a step where the script gives none."""


def attach(engine: Any, where: Where, **keywords: Any) -> SavedCheckpoints:
    """Has `engine.save_checkpoint` save to the repository `where` and `engine.load_checkpoint` restore from it; a
    script that calls them stays as it is. Call it on every rank, right behind `deepspeed.initialize`.

    `keywords` are those of a Checkpointer; with `data=loader` the position in the data is saved too.

    - `save_checkpoint(directory, tag, client_state)` returns True once the checkpoint is committed. Its step is
      `engine.global_steps`; a `tag` other than DeepSpeed's own `global_step…` becomes a tag of it. Nothing is written
      to the directory.
    - `load_checkpoint(directory, tag)` restores the checkpoint of that tag, or the newest one, and returns its name and
      the client state; (None, None) where there is none.

    Raises UsageError for keywords that a script decides by itself, and as `state` does.
    """
    refuse_decided(keywords, _OURS)
    return SavedCheckpoints(engine, where, keywords)


class SavedCheckpoints(Attached):
    """What `attach` puts in the place of an engine's methods."""

    def __init__(self, engine: Any, where: Where, keywords: Mapping[str, Any]) -> None:
        self._engine, self._where, self._keywords = engine, where, keywords
        self._client = _ClientState()
        self._state = {**state(engine), "client": first_rank(self._client)}
        engine.save_checkpoint, engine.load_checkpoint = self.save_checkpoint, self.load_checkpoint

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As `DeepSpeedEngine.save_checkpoint`; what says where and how files are written has no effect."""
        checkpointer = self._checkpointer or self._made(None)
        self._client.value = dict(client_state or {})
        if self._engine.global_steps > checkpointer.step:
            checkpointer.step_done(self._engine.global_steps)
        checkpointer.save(wait=True)
        if tag is not None and not _OWN_TAG.fullmatch(str(tag)):
            checkpointer.log(tag=str(tag))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: object = None,
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As `DeepSpeedEngine.load_checkpoint`, of a whole state."""
        if load_module_only or custom_load_fn or not (load_optimizer_states and load_lr_scheduler_states):
            raise UsageError(
                "load_checkpoint restores the whole state here, and a part of it was asked for",
                subject=os.fspath(load_dir or "load_checkpoint"),
                hint='tenuto.load(where, {"model": tenuto.deepspeed.state(engine)["model"]}) restores a part',
            )
        number = _OWN_TAG.fullmatch(str(tag)) if tag is not None else None
        self.close()
        start = "latest" if tag is None else int(number[1]) if number is not None else str(tag)
        restored = self._made(start).restore(strict=load_module_strict)
        if restored is None:
            return None, None
        return f"global_step{restored.step}", dict(self._client.value)

    def _made(self, resume_from: str | int | None) -> Checkpointer:
        self._checkpointer = Checkpointer(
            self._where, self._state, save=NEVER, resume_from=resume_from, **self._keywords
        )
        return self._checkpointer


class _ClientState:
    """What a script keeps beside the engine."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.value)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.value = dict(saved)
