"""What is said of a checkpoint beside its save: metrics that came late, and tags. Written once it is committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tenuto.engine.save.handle import Save
from tenuto.errors import TenutoError
from tenuto.model.canonical_json import tag_number
from tenuto.model.ids import CheckpointId
from tenuto.repo.notes import add_note
from tenuto.repo.refs import find_tag, is_damaged, put_ref
from tenuto.repo.repository import Repo


@dataclass(slots=True)
class _Said:
    save: Save
    metrics: dict[str, float] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


class DeferredNotes:
    """Notes and tags that wait for their saves to be committed. From any thread; what fails is warned of."""

    def __init__(self, repo: Repo, *, warn: Callable[[str], None]) -> None:
        self._repo = repo
        self._warn = warn
        self._lock = threading.Lock()
        self._said: dict[CheckpointId, _Said] = {}

    def note(self, save: Save, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._said.setdefault(save.id, _Said(save)).metrics.update(metrics)

    def tag(self, save: Save, names: Iterable[str]) -> None:
        with self._lock:
            said = self._said.setdefault(save.id, _Said(save)).tags
            said.extend(name for name in names if name not in said)

    @property
    def waits(self) -> bool:
        """Whether something of a save that has ended is still to be written."""
        with self._lock:
            return any(said.save.done for said in self._said.values())

    def write(self) -> None:
        """Writes what belongs to saves that have ended. Of one that failed its metrics are dropped, as it says itself
        that it did."""
        with self._lock:
            ready = [said for said in self._said.values() if said.save.done]
            for said in ready:
                del self._said[said.save.id]
        for said in ready:
            if said.save.committed:
                self._note(said)
                self._tag(said)
            elif said.tags:
                self._warn(f"{said.save.id} was not saved, and so not tagged {', '.join(said.tags)}")

    def _note(self, said: _Said) -> None:
        if not said.metrics:
            return
        body = {name: tag_number(value) for name, value in said.metrics.items()}
        try:
            add_note(self._repo, said.save.id, "metric", body)
        except TenutoError as error:
            self._warn(f"the metrics {sorted(body)} of {said.save.id} could not be noted: {error.message}")

    def _tag(self, said: _Said) -> None:
        for name in said.tags:
            try:
                before = None if is_damaged(self._repo, "tag", name) else find_tag(self._repo, name)
                put_ref(self._repo, "tag", name, said.save.id)
                if before is not None and before.run != said.save.id.run:
                    self._warn(f"the tag {name!r} has moved from {before} of another run to {said.save.id}")
            except TenutoError as error:
                self._warn(f"{said.save.id} could not be tagged {name!r}: {error.message}")
