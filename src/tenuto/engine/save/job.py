"""One save under way: what it is about, and what its two threads hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tenuto.engine.save.handle import Save
from tenuto.engine.staging.pack_content import Filling
from tenuto.engine.staging.plan import Digester, SavePlan
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Receipt
from tenuto.state.contract import Flattened


@dataclass(frozen=True, slots=True)
class ManifestDetails:
    """What a manifest says beside the state itself."""

    parent: CheckpointId | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, Json] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)
    certificate: Mapping[str, Json] = field(default_factory=dict)
    reason: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)
    """One for each random generator of this rank: those that are equal on all ranks are alike, and the manifest's
    progress says so."""


@dataclass(slots=True)
class Job:
    """One save under way."""

    save: Save
    plan: SavePlan
    flattened: Flattened
    about: ManifestDetails
    filling: Filling
    digester: Digester
    digest_while_writing: bool
    created: str
    begun: bool = False
    sealed: bool = False
    names: Sequence[str] = ()
    receipts: list[Receipt] = field(default_factory=list)
    """Of the packs, in order: a save that goes on after room was made does not write them again."""

    def aside_s(self) -> float:
        """What the writing thread has spent on digests and on waiting for the capture so far."""
        return self.filling.waited_s + (self.digester.seconds if self.digest_while_writing else 0.0)

    def timed(self) -> ManifestDetails:
        """What it is about, and in its environment where its time has gone so far."""
        self.save.clock.read_cpu()
        return replace(self.about, environment={**self.about.environment, "timing": self.save.timing.told()})
