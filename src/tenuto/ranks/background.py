"""The background work of a rank during training: its heartbeat, watching the others, save proposals, cleanup."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from typing import Final

from tenuto.errors import RanksError, RankStoreLost
from tenuto.ranks.heartbeats import beat
from tenuto.ranks.proposals import Proposal, Proposals
from tenuto.ranks.round import Round
from tenuto.ranks.session import Session

KIND: Final = "proposal"


class Heartbeat:
    """One daemon thread; none in a group of one. It never ends the training: waits report the errors it meets."""

    def __init__(
        self,
        session: Session,
        proposals: Proposals,
        round: Callable[[str, int], Round],
        live: Callable[[], dict[str, list[int]]],
        clean_up: Callable[[], None],
    ) -> None:
        self._session = session
        self._proposals = proposals
        self._open_round = round
        self._live = live
        self._clean_up = clean_up
        self._count = 0
        self._loss_reported = False
        self._leave_reason: str | None = None
        self._stopped = threading.Event()
        self._last_wish = ""
        self._deciding: Round | None = None
        self._unpublished: Proposal | None = None
        self._unsent_answer: tuple[Round, bool] | None = None
        """An answer that is not in the key-value store yet."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. Raises RankStoreLost if the first heartbeat cannot be put."""
        if self._session.world_size == 1:
            return
        self._session.stall_guard.begin_beat()
        self._session.ask(self._beat, "start")
        self._thread = threading.Thread(target=self._run, name="tenuto-ranks-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, reason: str, *, failed: bool = False) -> None:
        """Stops the thread and puts a last heartbeat with `reason`. Does not raise where the key-value store is
        lost. `failed`: this rank leaves because of an error, which the others are to learn."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is None:
            return
        session = self._session
        if self._thread is not threading.current_thread() and not session.kv_store.lost:
            self._thread.join(session.settings.beat_s + session.settings.answer_s)
        self._leave_reason = reason
        try:
            self._beat(session.settings.answer_s)
            if failed and session.kv_store.host_rank == session.rank:
                self._await_readers()
            self._clean_up()
        except RankStoreLost:
            return  # ranks that wait for this one lose the store as well

    def _await_readers(self) -> None:
        """Waits until the other ranks have left, or had three beats to read why this one does: the key-value store
        goes with this process."""
        session = self._session
        deadline = session.settings.deadline(3 * session.settings.beat_s)
        remaining = [rank for rank in range(session.world_size) if rank != session.rank]
        while remaining and not deadline.passed:
            session.watch.refresh(session.settings.answer_s)
            session.watch.read(remaining, session.settings.answer_s)
            gone = {*session.watch.departed(remaining), *session.watch.lost(remaining)}
            remaining = [rank for rank in remaining if rank not in gone]
            session.settings.clock.sleep(session.kv_store.longest_pause_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._session.settings.beat_s):
            self._session.stall_guard.begin_beat()
            self._session.watch.refresh(self._session.settings.answer_s)
            self._report_loss()
            try:
                self._beat(self._session.settings.answer_s)
                self._watch()
                self._propose()
                self._clean_up()
            except RanksError:
                continue  # retried at the next beat; a rank that waits for something gets the error from its own wait

    def _report_loss(self) -> None:
        """Reports, once, that this session can agree on nothing any more."""
        loss, report = self._session.loss, self._session.on_loss
        if loss is not None and report is not None and not self._loss_reported:
            self._loss_reported = True
            report(loss)

    def _beat(self, timeout: float) -> None:
        self._count += 1
        stall_guard = self._session.stall_guard
        status, live = self._session.status, self._live()
        raw = beat(
            self._count,
            status,
            self._leave_reason,
            live,
            challenge=stall_guard.last_challenge,
            given_up=stall_guard.given_up,
            dead=self._session.watch.dead(),
        )
        self._session.kv_store.put(self._session.beat_key(self._session.rank), raw, timeout=timeout)

    def _watch(self) -> None:
        session = self._session
        ranks = [rank for rank in range(session.world_size) if rank] if session.is_coordinator else [0]
        session.watch.read(ranks, session.settings.answer_s)

    # -- proposals

    def ask(self, reason: str) -> None:
        """Requests a save. Raises RankStoreLost."""
        session = self._session
        if session.is_coordinator:
            self._proposals.wish(session.rank, reason)
            return
        raw = json.dumps({"token": secrets.token_hex(8), "rank": session.rank, "reason": reason}).encode()
        session.ask(lambda timeout: session.kv_store.put(session.key("wish"), raw, timeout=timeout), "wish for a save")

    def _propose(self) -> None:
        if self._session.is_coordinator:
            self._receive_wish()
            self._publish()  # what the store did not take at the previous beat
            self._decide()
            proposal = self._proposals.next()
            if proposal is not None:
                self._deciding, self._unpublished = self._open_round(KIND, proposal.number), proposal
                self._publish()
        else:
            self._publish_answer()
            keys = [self._session.key("proposal"), self._session.stall_guard.key]
            raw, challenge = self._session.kv_store.get_many(keys, timeout=self._session.settings.answer_s)
            self._session.stall_guard.receive_challenge(challenge)
            if raw is not None:
                values = json.loads(raw)
                self._answer(Proposal(values["number"], values["step"], values["reason"], values["by"]))

    def _receive_wish(self) -> None:
        raw = self._session.kv_store.get(self._session.key("wish"), timeout=self._session.settings.answer_s)
        if raw is not None:
            wish = json.loads(raw)
            if wish["token"] != self._last_wish:
                self._last_wish = wish["token"]
                self._proposals.wish(wish["rank"], wish["reason"])

    def _publish(self) -> None:
        """Puts the unpublished proposal and this rank's own answer to it."""
        proposal = self._unpublished
        if proposal is not None:
            names = ("number", "step", "reason", "by")
            raw = json.dumps({name: getattr(proposal, name) for name in names}).encode()
            key = self._session.key("proposal")
            self._session.ask(lambda timeout: self._session.kv_store.put(key, raw, timeout=timeout), KIND)
            self._unpublished = None
            self._answer(proposal)
        self._publish_answer()

    def _answer(self, proposal: Proposal) -> None:
        if self._proposals.new(proposal):
            # The round comes first: once the answer is armed, training may reach the step and wait in the round.
            round = self._deciding if self._deciding is not None else self._open_round(KIND, proposal.number)
            self._unsent_answer = round, self._proposals.answer(proposal)
        self._publish_answer()

    def _publish_answer(self) -> None:
        if self._unsent_answer is not None:
            round, can = self._unsent_answer
            round.send(b"1" if can else b"0", again=True)
            self._unsent_answer = None
            if not can and not self._session.is_coordinator:
                round.end()

    def _decide(self) -> None:
        """Announces the outcome of the open proposal if all ranks have answered. Does not wait."""
        round = self._deciding
        if round is None or self._unpublished is not None:
            return
        try:
            settled = round.outcome()  # announced at the previous beat by a call whose answer was lost
            if settled is None:
                answers = round.gathered()
                if answers is None:
                    return
                settled = b"1" if all(answer == b"1" for answer in answers) else b"0"
                round.broadcast(settled)
            agreed = settled == b"1"
        except RankStoreLost:
            raise
        except RanksError:
            agreed = False  # a rank that waited for it gave up; the request stays
        if not agreed:
            self._proposals.withdrawn(round.number)
        self._deciding = None
        self._proposals.decided(agreed)
        if not agreed:
            round.end()
