"""What a rank does in the background while it trains: a sign of life, a look at the others, proposals, tidying up."""

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
    """One daemon thread; none where the rank is alone. It never ends the training: what it meets is told by waits."""

    def __init__(
        self,
        session: Session,
        proposals: Proposals,
        round: Callable[[str, int], Round],
        live: Callable[[], dict[str, list[int]]],
        tidy: Callable[[], None],
    ) -> None:
        self._session = session
        self._proposals = proposals
        self._open_round = round
        self._live = live
        self._tidy = tidy
        self._count = 0
        self._left: str | None = None
        self._stopped = threading.Event()
        self._asked = ""
        self._deciding: Round | None = None
        self._unpublished: Proposal | None = None
        self._owed: tuple[Round, bool] | None = None
        """An answer that is not on the board yet."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises RankStoreLost if the first sign of life cannot be given."""
        if self._session.world_size == 1:
            return
        self._session.roll.turned()
        self._session.ask(self._beat, "start")
        self._thread = threading.Thread(target=self._run, name="tenuto-ranks-pulse", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """The last sign of life says that this rank leaves. Never raises for a board that is lost."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is None:
            return
        if self._thread is not threading.current_thread():
            self._thread.join(self._session.settings.beat_s + self._session.settings.answer_s)
        self._left = reason
        try:
            self._beat(self._session.settings.answer_s)
            self._tidy()
        except RankStoreLost:
            return  # whoever waits for this rank loses the board likewise

    def _run(self) -> None:
        while not self._stopped.wait(self._session.settings.beat_s):
            self._session.roll.turned()
            try:
                self._beat(self._session.settings.answer_s)
                self._watch()
                self._propose()
                self._tidy()
            except RanksError:
                continue  # tried again at the next beat; who waits for something is told by his own wait

    def _beat(self, timeout: float) -> None:
        self._count += 1
        roll = self._session.roll
        story, live = self._session.story, self._live()
        raw = beat(self._count, story, self._left, live, word=roll.heard, given_up=roll.given_up)
        self._session.kv_store.put(self._session.beat_key(self._session.rank), raw, timeout=timeout)

    def _watch(self) -> None:
        session = self._session
        ranks = [rank for rank in range(session.world_size) if rank] if session.is_coordinator else [0]
        session.watch.read(ranks, session.settings.answer_s)

    # -- proposals

    def ask(self, reason: str) -> None:
        """This rank wishes for a save. Raises RankStoreLost."""
        session = self._session
        if session.is_coordinator:
            self._proposals.wish(session.rank, reason)
            return
        raw = json.dumps({"token": secrets.token_hex(8), "rank": session.rank, "reason": reason}).encode()
        session.ask(lambda timeout: session.kv_store.put(session.key("wish"), raw, timeout=timeout), "wish for a save")

    def _propose(self) -> None:
        if self._session.is_coordinator:
            self._receive_wish()
            self._publish()  # what the board did not take at the beat before
            self._decide()
            proposal = self._proposals.next()
            if proposal is not None:
                self._deciding, self._unpublished = self._open_round(KIND, proposal.number), proposal
                self._publish()
        else:
            self._publish_answer()
            keys = [self._session.key("proposal"), self._session.roll.key]
            raw, word = self._session.kv_store.get_many(keys, timeout=self._session.settings.answer_s)
            self._session.roll.listen(word)
            if raw is not None:
                values = json.loads(raw)
                self._answer(Proposal(values["number"], values["step"], values["reason"], values["by"]))

    def _receive_wish(self) -> None:
        raw = self._session.kv_store.get(self._session.key("wish"), timeout=self._session.settings.answer_s)
        if raw is not None:
            wish = json.loads(raw)
            if wish["token"] != self._asked:
                self._asked = wish["token"]
                self._proposals.wish(wish["rank"], wish["reason"])

    def _publish(self) -> None:
        """Puts the proposal that is not on the board yet, and this rank's own answer to it."""
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
            # The topic first: training may come to the step, and wait there, as soon as it is armed.
            round = self._deciding if self._deciding is not None else self._open_round(KIND, proposal.number)
            self._owed = round, self._proposals.answer(proposal)
        self._publish_answer()

    def _publish_answer(self) -> None:
        if self._owed is not None:
            round, can = self._owed
            round.send(b"1" if can else b"0", again=True)
            self._owed = None
            if not can and not self._session.is_coordinator:
                round.end()

    def _decide(self) -> None:
        """Announces what came of the proposal that is open, if all have answered. Waits for nobody."""
        round = self._deciding
        if round is None or self._unpublished is not None:
            return
        try:
            standing = round.outcome()  # announced at the beat before, by a call whose answer did not come
            if standing is None:
                answers = round.gathered()
                if answers is None:
                    return
                standing = b"1" if all(answer == b"1" for answer in answers) else b"0"
                round.broadcast(standing)
            agreed = standing == b"1"
        except RankStoreLost:
            raise
        except RanksError:
            agreed = False  # who waited for it has given up; the wish stands
        if not agreed:
            self._proposals.withdrawn(round.number)
        self._deciding = None
        self._proposals.decided(agreed)
        if not agreed:
            round.end()
