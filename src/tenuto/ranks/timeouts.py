"""Time as the ranks use it: each its own monotonic clock, never compared with another's."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.concurrency.deadlines import Clock


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time that several waits may share. It keeps running while this process is stopped."""

    seconds: float
    clock: Clock = field(default_factory=Clock)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", self.clock.now() + self.seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - self.clock.now())

    @property
    def passed(self) -> bool:
        return self.clock.now() >= self.at


@dataclass(frozen=True, slots=True)
class Settings:
    """The intervals and limits of heartbeats, requests and the handshake. Seconds."""

    beat_s: float = 1.0
    dead_after_s: float = 60.0
    """A rank without a heartbeat for so long is stopped or dead. A process that computes without a pause sends none
    either."""
    answer_s: float = 10.0
    """The limit for one request to the key-value store."""
    probe_s: float = 2.0
    """The interval at which present ranks check their facts while others are still to come."""
    clock: Clock = field(default_factory=Clock)

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.clock)
