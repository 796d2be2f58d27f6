"""`save_state` and `load_state` of an Accelerator, for scripts as they are.

Each directory that a script saves into holds what the script's own hooks write, and a small file that names the
checkpoint.

A directory appears under its name once the checkpoint is committed, so that a script which looks for the newest one
never finds one that a kill has cut short.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from tenuto.api.repository import Repository
from tenuto.errors import CheckpointNotFound, CorruptionError, RanksMissing, UsageError, typed
from tenuto.events import warn
from tenuto.integrations.accelerate.prepared_state import check, prepared, state
from tenuto.integrations.attached import NEVER, Attached, refuse_decided
from tenuto.integrations.torch.data.prepared import PreparedLoaders, position_of
from tenuto.log_lines import log
from tenuto.model.ids import attempt_key
from tenuto.policy import keep
from tenuto.regular_files import opener
from tenuto.store.contract import Where
from tenuto.training.checkpointer import Checkpointer

POINTER: Final = "tenuto_checkpoint.json"
_LARGEST: Final = 1 << 16
_OURS: Final = {
    "save": "the script's calls of save_state say when to save",
    "resume_from": "the script's call of load_state says where to resume",
    "data": "the loaders that accelerate prepares are its data",
    "state": "what accelerate prepares and registers is its state",
}
_ITS_OWN: Final = re.compile(r"random_states_\d+\.pkl")
"""What accelerate writes into every directory of its own."""


def attach(accelerator: Any, where: Where, **keywords: Any) -> SavedStates:
    """Has `accelerator.save_state` and `load_state` save to the repository `where` and restore from it, with the
    position in the data; a script that calls them stays as it is. Call it right behind `Accelerator(…)`.

    `keywords` are those of a Checkpointer. Without `keep` (or `save_top_k` and the like) everything is kept, or as many
    as `ProjectConfiguration(total_limit=)` says.

    - `save_state(directory)` returns once the checkpoint is committed. The directory gets what the hooks of
      `register_save_state_pre_hook` write, and a file that names the checkpoint. All ranks have to call it.
    - `load_state(directory)` restores that checkpoint. One that accelerate itself has written is read by accelerate.
    - After it the prepared loader continues where it was; `skip_first_batches` with that number returns it as it is.

    Raises UsageError for keywords that a script decides by itself.
    """
    refuse_decided(keywords, _OURS)
    check(accelerator)
    return SavedStates(accelerator, where, keywords)


class SavedStates(Attached):
    """What `attach` puts in the place of an Accelerator's methods."""

    def __init__(self, accelerator: Any, where: Where, keywords: dict[str, Any]) -> None:
        self._accelerator, self._where, self._keywords = accelerator, where, keywords
        self._state: dict[str, Any] = {}
        self._load_its_own = accelerator.load_state
        self._skip_its_own = accelerator.skip_first_batches
        self._loaders = PreparedLoaders(lambda: prepared(accelerator, "loaders"))
        for name in ("save_state", "load_state", "skip_first_batches"):
            setattr(accelerator, name, getattr(self, name))
        accelerator.prepare_data_loader = self._followed(accelerator.prepare_data_loader)
        accelerator.end_training = self._ended(accelerator.end_training)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **unused: Any
    ) -> str:
        """As `Accelerator.save_state`; `safe_serialization` and further arguments are about files that are not written
        here."""
        directory = self._named(output_dir)
        unfinished = directory.with_name(f".{directory.name}.saving")
        unfinished.mkdir(parents=True, exist_ok=True)
        accelerator, hooks = self._accelerator, prepared(self._accelerator, "save_hooks")
        if hooks:
            models = prepared(accelerator, "models")
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
            for hook in hooks.values():
                hook(models, weights, str(unfinished))
        pointer = self._save(directory)
        if accelerator.is_main_process:
            (unfinished / POINTER).write_text(json.dumps(pointer, indent=1) + "\n")
            _put_in_place(unfinished, directory)
            self._make_room()
        accelerator.project_configuration.iteration += 1
        return str(directory)

    def _save(self, directory: Path) -> dict[str, Any]:
        checkpointer = self._checkpointer or self._made(None)
        self._state.update(state(self._accelerator))
        number = re.search(r"(\d+)$", directory.name)
        step = max(int(number[1]) if number is not None else 0, checkpointer.step + 1)
        try:
            checkpointer.step_done(step)
            saved = checkpointer.save(wait=True)
        except RanksMissing as error:
            hint = "call save_state on every rank, not only where accelerator.is_main_process"
            raise RanksMissing(error.message, subject=error.subject, hint=hint) from error
        checkpoint = f"{attempt_key(saved.id.attempt)}/{saved.id.step}"
        return {"tenuto": 1, "repository": self._repository_id, "run": saved.id.run, "checkpoint": checkpoint}

    @functools.cached_property
    def _repository_id(self) -> str:
        return Repository(self._where).id

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """As `Accelerator.load_state`."""
        directory = self._newest() if input_dir is None else Path(input_dir).expanduser()
        pointer = _pointer(directory)
        if pointer is None:
            if any(_ITS_OWN.fullmatch(name) for name in os.listdir(directory)):
                log(logging.INFO, f"{directory} was written by accelerate itself, and is read by it: begins its epoch")
                self._load_its_own(str(directory), load_kwargs, **load_model_func_kwargs)
                return
            raise CheckpointNotFound(
                f"{directory} names no checkpoint: it was not written by save_state, or a kill has cut that short",
                subject=str(directory),
                hint=f"remove it ({typed('rm', '-r', directory)}), and start the script again",
            )
        run = self._keywords.get("run", "main")
        if (self._repository_id, run) != (pointer["repository"], pointer["run"]):
            raise CheckpointNotFound(
                f"{directory} names a checkpoint of run {pointer['run']} in the repository {pointer['repository']}, "
                f"which is not run {run} at {self._where}",
                subject=str(directory),
                hint="give attach() the place, and the run=, that the script saved to",
            )
        self.close()
        models = list(prepared(self._accelerator, "models"))
        for hook in prepared(self._accelerator, "load_hooks").values():
            hook(models, str(directory))
        self._made(pointer["checkpoint"]).restore()
        for loader in prepared(self._accelerator, "loaders"):
            position = position_of(loader)
            if position is not None and position.resumes_inside:
                log(
                    logging.INFO,
                    f"the data continues in epoch {position.iteration} after {position.delivered} batches: iterate the "
                    f"prepared loader, or skip_first_batches(loader, {position.delivered}), which returns it",
                )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As `Accelerator.skip_first_batches`; returns a loader that was restored after as many batches itself."""
        position = position_of(dataloader)
        if position is None:
            return self._skip_its_own(dataloader, num_batches)
        restored = position.delivered if position.resumes_inside else 0
        if num_batches == restored:
            return dataloader
        warn(
            f"skip_first_batches(loader, {num_batches}) of a loader that was restored after {restored} batches: the "
            "epoch is drawn again, which is not an exact resume"
        )
        position.forget()
        return self._skip_its_own(dataloader, num_batches)

    def _made(self, resume_from: str | None) -> Checkpointer:
        self._state = state(self._accelerator)
        keywords = dict(self._keywords)
        limit = self._accelerator.project_configuration.total_limit
        if not keywords.keys() & {"keep", "save_top_k", "save_last", "max_to_keep"}:
            keywords["keep"] = keep.all() if limit is None else keep.latest(limit)
        self._checkpointer = Checkpointer(
            self._where, self._state, data=self._loaders, save=NEVER, resume_from=resume_from, **keywords
        )
        return self._checkpointer

    # -- directories, named as accelerate does

    def _named(self, output_dir: str | os.PathLike[str] | None) -> Path:
        accelerator = self._accelerator
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise UsageError(
                    "save_state needs a directory", subject="output_dir", hint='save_state("checkpoint-1")'
                )
            return Path(output_dir).expanduser()
        parent = Path(accelerator.project_dir) / "checkpoints"
        directory = parent / f"checkpoint_{accelerator.save_iteration}"
        if directory.exists():
            raise UsageError(
                f"{directory} exists already",
                subject=str(directory),
                hint="set accelerator.project_configuration.iteration to the next number",
            )
        return directory

    def _make_room(self) -> None:
        """Removes the directories beyond `total_limit`: once the new one is there, or a kill would leave none."""
        configuration = self._accelerator.project_configuration
        if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
            there = _numbered(Path(self._accelerator.project_dir) / "checkpoints")
            for old in there[: max(len(there) - configuration.total_limit, 0)]:
                shutil.rmtree(old)

    def _newest(self) -> Path:
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        there = _numbered(Path(self._accelerator.project_dir) / "checkpoints") if automatic else []
        if not there:
            raise UsageError("there is nothing to load", subject="input_dir", hint='load_state("checkpoint-1")')
        return there[-1]

    # -- methods around the Accelerator's own

    def _followed(self, prepare_data_loader: Any) -> Any:
        @functools.wraps(prepare_data_loader)
        def followed(*arguments: Any, **options: Any) -> Any:
            loader = prepare_data_loader(*arguments, **options)
            self._loaders.positions()
            return loader

        self._loaders.positions()
        return followed

    def _ended(self, end_training: Any) -> Any:
        @functools.wraps(end_training)
        def ended() -> None:
            self.close()
            end_training()

        return ended


def _numbered(parent: Path) -> list[Path]:
    """Returns the directories of automatic naming, the oldest first."""
    found = parent.glob("checkpoint_*") if parent.is_dir() else ()
    return sorted(found, key=lambda one: int(re.sub(r"\D", "", one.name) or 0))


def _put_in_place(unfinished: Path, directory: Path) -> None:
    if not directory.exists():
        unfinished.rename(directory)
        return
    for entry in sorted(os.listdir(unfinished), key=lambda name: name == POINTER):  # the pointer last
        there = directory / entry
        if there.is_dir():
            shutil.rmtree(there)
        (unfinished / entry).replace(there)
    unfinished.rmdir()


def _pointer(directory: Path) -> dict[str, str] | None:
    """Returns what the file in a directory says; None where there is none."""
    if not directory.is_dir():
        raise CheckpointNotFound(f"there is no directory {directory}", subject=str(directory))
    file = directory / POINTER
    if not file.exists():
        return None
    try:
        with open(file, opener=opener) as text:
            found = json.loads(text.read(_LARGEST))
        names = {name: found[name] for name in ("repository", "run", "checkpoint")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"{file} is damaged: {error!r}", subject=str(file)) from error
    if not all(isinstance(value, str) for value in names.values()):
        raise CorruptionError(f"{file} is damaged: it names no checkpoint", subject=str(file))
    return names
