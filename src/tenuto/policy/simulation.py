"""A training of weeks on thousands of machines, failure by failure, without the machines: what failures cost.

Time passes from failure to failure. Between two of them training saves every so often; a failure sends it back to the
newest state that survives it, after a pause. Nothing is drawn but when failures come and whether they take a node with
them, so a simulation of months takes a moment.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Final

from tenuto.errors import UsageError
from tenuto.policy.interval import SaveCosts, interval
from tenuto.policy.prediction import Plan, Predictor, plan
from tenuto.record import record

LEAST_NODE_SHARE: Final = 0.01
"""Even where no failure is expected to take a node with it, saves to the store are taken as if one in a hundred did."""


@record
class Job:
    """A training and what happens to it. Times in seconds.

    work_s: useful work to do. mtbf_s: between failures of the whole job. shape: of the Weibull distribution of times
    between them, 1 for failures without memory. costs: of a save to the store. save_s: work between saves; None: the
    optimum. restart_s: from a failure to where training continues from the store.
    memory_s: work between states kept in memory, None without. memory_stall_s: what one costs. memory_restart_s: from a
    failure to where training continues from memory. node_share: of failures that take a node's memory with them.
    replicas: whether other nodes have in memory what a lost one had: the restart saves it, and resumes from it.
    predictor: raises alarms before failures, and false ones; they are heeded if they are worth it.
    """

    work_s: float
    mtbf_s: float
    costs: SaveCosts
    restart_s: float
    save_s: float | None = None
    shape: float = 1.0
    memory_s: float | None = None
    memory_stall_s: float = 0.0
    memory_restart_s: float = 0.0
    node_share: float = 0.25
    replicas: bool = False
    predictor: Predictor | None = None

    @property
    def between_saves_s(self) -> float:
        """Work between two saves to the store. With states in memory only lost nodes without replicas need one."""
        return self._plan.work_s

    @property
    def heeds(self) -> Plan | None:
        """What is done about alarms; None where they are not worth it, or nobody raises any."""
        return self._plan if self._plan.trusted else None

    @property
    def _plan(self) -> Plan:
        lost = 0.0 if self.replicas else self.node_share
        share = 1.0 if self.memory_s is None else max(lost, LEAST_NODE_SHARE)
        if self.predictor is None:
            return Plan(self.save_s or interval(self.costs, self.mtbf_s / share), 0.0, 0.0, False)
        return plan(self.costs, self.mtbf_s / share, self.predictor, self.save_s)


@record
class Outcome:
    """Where the time of a training went, in seconds: `elapsed_s` is the sum of the others."""

    elapsed_s: float
    work_s: float
    saving_s: float
    """Stalls for saves and states in memory, and what saves slow down."""
    lost_s: float
    """Work that had to be done again."""
    down_s: float
    failures: int
    from_memory: int
    """Failures after which training continued from memory."""
    between_saves_s: float
    alarms: int = 0
    """Those that were heeded."""

    @property
    def ettr(self) -> float:
        """The effective training time ratio: useful work per time, 0 to 1."""
        return self.work_s / self.elapsed_s


def simulate(job: Job, seed: int = 0, *, most_failures: int = 1_000_000) -> Outcome:
    """Simulates the job to its end. Raises UsageError for numbers that make no sense, and for a job that does not come
    to its end within `most_failures`."""
    _check(job)
    source = random.Random(seed)
    scale = job.mtbf_s / math.gamma(1 + 1 / job.shape)
    way = _Way(job, _Stretch.of(job), job.heeds)
    done = stored = elapsed = saving = lost = down = 0.0
    failures = from_memory = heeded = 0
    while True:
        up_s = source.weibullvariate(scale, job.shape)
        alarms = way.alarms(up_s, source)
        heeded += len(alarms)
        spent, reached, stored = way.train(done, stored, up_s, alarms)
        if reached >= job.work_s:
            saving += spent - (job.work_s - done)
            elapsed += spent
            return Outcome(
                elapsed, job.work_s, saving, lost, down, failures, from_memory, way.usual.between_s, heeded
            )  # fmt: skip
        with_node = job.memory_s is None or source.random() < job.node_share
        gathered = with_node and job.memory_s is not None and job.replicas
        kept = stored if with_node and not gathered else max(stored, way.usual.in_memory(done, reached))
        pause_s = job.restart_s if with_node else job.memory_restart_s
        if gathered:
            pause_s += job.costs.persist_s
            stored = kept
        failures += 1
        from_memory += gathered or not with_node
        while failures < most_failures and (again_s := source.weibullvariate(scale, job.shape)) < pause_s:
            down, elapsed, failures = down + again_s, elapsed + again_s, failures + 1  # it fails while it comes back
        if failures >= most_failures:
            raise UsageError(
                f"after {failures:,} failures {kept / job.work_s:.1%} of the work is done: it does not end",
                hint="fewer failures, cheaper saves or faster restarts",
            )
        saving += up_s - (reached - done)
        lost += reached - kept
        down += pause_s
        elapsed += up_s + pause_s
        done = kept


@record
class _Way:
    """How a job trains: its usual stretch, and what it does about alarms."""

    job: Job
    usual: _Stretch
    heeds: Plan | None

    def alarms(self, up_s: float, source: random.Random) -> list[float]:
        """Draws when alarms come before the next failure: perhaps a right one, and false ones without memory."""
        predictor = self.job.predictor
        if self.heeds is None or predictor is None:
            return []
        found = [max(up_s - predictor.lead_s, 0.0)] if source.random() < predictor.recall else []
        rate = predictor.recall / self.job.mtbf_s * (1 - predictor.precision) / predictor.precision
        at_s = 0.0
        while rate and (at_s := at_s + source.expovariate(rate)) < up_s:
            found.append(at_s)
        return sorted(found)

    def train(self, done: float, stored: float, up_s: float, alarms: list[float]) -> tuple[float, float, float]:
        """Trains until the failure after `up_s`, or to the end. Returns the time spent, the work reached, and the
        durable work. An alarm within a save takes effect after it."""
        now, at, last = 0.0, done, stored
        stretch, due = self.usual, stored + self.usual.between_s
        for change_s, alarmed in [*self._changes(alarms), (up_s, False)]:
            stretch = replace(stretch, begun_s=at, first_s=max(due, at))
            if now + (spent := stretch.time_until(self.job.work_s)) <= min(max(change_s, now), up_s):
                return now + spent, self.job.work_s, stored
            until_s = up_s if change_s >= up_s else min(now + stretch.after_save(max(change_s - now, 0.0)), up_s)
            if (saves := stretch.saves_in(until_s - now)) > 0:
                last = stretch.first_s + (saves - 1) * stretch.between_s
                stored = max(stored, min(last, stretch.durable_in(up_s - now)))
            now, at = until_s, stretch.reached_in(until_s - now)
            if now >= up_s or self.heeds is None:
                break
            stretch = replace(self.usual, between_s=self.heeds.window_s if alarmed else self.usual.between_s)
            due = at if alarmed and at - last >= self.heeds.stake_s else last + stretch.between_s
        return up_s, at, stored

    def _changes(self, alarms: list[float]) -> list[tuple[float, bool]]:
        """Returns when an alarm begins (True), and when the last of some that overlap is over (False)."""
        lead_s = self.job.predictor.lead_s if self.job.predictor is not None else 0.0
        found = [(at_s, True) for at_s in alarms]
        next_s = [*alarms[1:], math.inf]
        found += [
            (at_s + lead_s, False) for at_s, then_s in zip(alarms, next_s, strict=False) if then_s > at_s + lead_s
        ]
        return sorted(found)


@record
class _Stretch:
    """Training from a start to the next failure. Work is counted from the beginning of the job, in seconds.

    begun_s: the work that was done at the start. first_s: the work after which the first save is due, at once where
    that is past; the next ones follow `between_s` after each other.
    """

    between_s: float
    pace: float
    """Time for a second of work, states in memory included."""
    save_s: float
    """What a save takes of training, its slowdown included."""
    persist_s: float
    memory_s: float
    begun_s: float = 0.0
    first_s: float = 0.0

    @classmethod
    def of(cls, job: Job) -> _Stretch:
        pace = 1.0 if job.memory_s is None else 1 + job.memory_stall_s / job.memory_s
        return cls(job.between_saves_s, pace, job.costs.cost_s, job.costs.persist_s, job.memory_s or 0.0)

    @property
    def _first_saved_s(self) -> float:
        """The time after which the first save is taken."""
        return (self.first_s - self.begun_s) * self.pace + self.save_s

    @property
    def _each_s(self) -> float:
        """The time from one save to the next."""
        return self.between_s * self.pace + self.save_s

    def time_until(self, work_s: float) -> float:
        """Returns how long it takes to come to so much work. What is done at the end needs no save."""
        saves = max(math.ceil((work_s - self.first_s) / self.between_s), 0)
        return (work_s - self.begun_s) * self.pace + saves * self.save_s

    def reached_in(self, time_s: float) -> float:
        """Returns the work that is done after so much time."""
        if time_s < self._first_saved_s:
            return min(self.begun_s + time_s / self.pace, self.first_s)
        whole, rest_s = divmod(time_s - self._first_saved_s, self._each_s)
        return self.first_s + whole * self.between_s + min(rest_s / self.pace, self.between_s)

    def durable_in(self, time_s: float) -> float:
        """Returns the work in the newest save that is durable after so much time; 0 without one."""
        since_s = time_s - self.persist_s - self._first_saved_s + 1e-9
        return self.first_s + since_s // self._each_s * self.between_s if since_s >= 0 else 0.0

    def saves_in(self, time_s: float) -> int:
        """Returns how many saves have been taken after so much time."""
        since_s = time_s - self._first_saved_s + 1e-9
        return int(since_s // self._each_s) + 1 if since_s >= 0 else 0

    def after_save(self, time_s: float) -> float:
        """Returns that time, or where it is within a save, the end of that."""
        next_s = self._first_saved_s + self.saves_in(time_s) * self._each_s
        return next_s if next_s - self.save_s < time_s else time_s

    def in_memory(self, begun_s: float, reached_s: float) -> float:
        """Returns the work in the newest state in memory of a training that began with so much."""
        return begun_s + (reached_s - begun_s) // self.memory_s * self.memory_s


def _check(job: Job) -> None:
    for name, value in (("work", job.work_s), ("time between failures", job.mtbf_s), ("Weibull shape", job.shape)):
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"the {name} of a job is finite and above 0, not {value:g}")
    if job.save_s is not None and job.save_s <= 0:
        raise UsageError(f"there must be work between two saves, not {job.save_s:g} s")
    if job.memory_s is not None and job.memory_s <= 0:
        raise UsageError(f"there must be work between two states in memory, not {job.memory_s:g} s")
    if not 0 <= job.node_share <= 1:
        raise UsageError(f"the share of failures that take a node is 0 to 1, not {job.node_share:g}")
    if min(job.restart_s, job.memory_restart_s, job.memory_stall_s, job.costs.stall_s, job.costs.persist_s) < 0:
        raise UsageError("times are not below 0")
