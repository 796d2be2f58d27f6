"""What training is told when its values or its loss go wrong: found by saves and by `log`, acted upon between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal

from tenuto.model.health import Health
from tenuto.model.ids import CheckpointId
from tenuto.policy.spikes import Kind, SpikeWatch, falls
from tenuto.record import record
from tenuto.repo.health import newest_healthy, way_back
from tenuto.repo.repository import Repo

if TYPE_CHECKING:
    from tenuto.training.arguments import OnUnhealthy

_METRICS: Final = 100
"""The most metrics that are watched."""


@record
class Unhealthy:
    """What went wrong in training.

    what: "values" where a checkpoint has leaves that became NaN or infinite, else what a metric did: "spike",
        "divergence" or "nan".
    step: of that checkpoint, or of the metric. leaves: at most eight of those leaves, by path. metric: its name, else
    empty. message: all of that in words.
    last_healthy: the newest checkpoint to go back to; None if there is none.
    """

    what: Literal["values"] | Kind
    step: int
    message: str
    leaves: tuple[str, ...] = ()
    metric: str = ""
    last_healthy: CheckpointId | None = None

    def __str__(self) -> str:
        return self.message


class HealthReports:
    """Collects what saves and logged metrics show, and acts on it in the training thread."""

    def __init__(
        self,
        repo: Repo,
        run: str,
        act: OnUnhealthy,
        *,
        modes: Mapping[str, str],
        report: Callable[[str], None],
        acts: bool,
        ends: Callable[[str, int], None] = lambda message, step: None,
    ) -> None:
        """`act`: as `Checkpointer.on_unhealthy`; `acts`: whether this rank calls it. `ends`: called with what went
        wrong, and at which step, where training ends because of it."""
        self._ends = ends
        self._repo = repo
        self._run = run
        self._act = act if acts else None
        self.hears = self._act is not None
        """Whether somebody wants to hear of what is found: else `logged` and `act` have nothing to do."""
        self._modes = modes
        self._report = report
        self._found: deque[Unhealthy] = deque()
        self._watches: dict[str, SpikeWatch] = {}
        self._judged: dict[str, int] = {}
        """The step of each metric's last value: what is logged twice counts once."""
        self._last_healthy: CheckpointId | None = None
        self._was_healthy = True

    def committed(self, id: CheckpointId, health: Health | None) -> None:
        """Notes the health of a checkpoint, in the writing thread. The first unhealthy one in a row is reported."""
        if health is None:
            return
        before, self._was_healthy = self._was_healthy, health.healthy
        if health.healthy:
            self._last_healthy = id
        elif before:
            last = self._last_healthy or newest_healthy(self._repo, self._run)
            found = Unhealthy("values", id.step, f"{id} is unhealthy: {health}", health.paths, "", last)
            if self._act is None:
                self._report(f"{found.message}; {way_back(self._repo.url, last)}")
            else:
                self._found.append(found)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Judges metrics of a step."""
        for name, value in metrics.items():
            if name not in self._watches and (len(self._watches) >= _METRICS or not falls(name, self._modes.get(name))):
                continue
            if self._judged.get(name) == step:
                continue
            self._judged[name] = step
            spike = self._watches.setdefault(name, SpikeWatch()).add(step, value)
            if spike is not None:
                words = {
                    "nan": f"{name} is {value:g}",
                    "spike": f"{name} jumps to {value:g}, from about {spike.median:g}",
                    "divergence": f"{name} diverges: {value:g}, from about {spike.median:g}",
                }[spike.kind]
                message = f"step {step}: {words}"
                self._found.append(Unhealthy(spike.kind, step, message, (), name, self._last_healthy))

    def act(self) -> bool:
        """Calls the function for all that was found; returns whether training is to stop. What it raises ends
        training."""
        stop = False
        while self._found:
            found = self._found.popleft()
            if callable(self._act):
                try:
                    self._act(found)
                except BaseException:
                    self._ends(found.message, found.step)
                    raise
            elif found.what != "spike":  # a single spike is no reason to end
                self._report(f"training stops: {found.message}; {way_back(self._repo.url, found.last_healthy)}")
                self._ends(found.message, found.step)
                stop = True
        return stop
