"""Ranks that are real processes, each doing what it is told over a pipe, one command after another."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.ports import free_port
from support import forked_processes as forked

DEADLINE_S = 4.0
DEAD_S = 3.0
"""What a busy machine lets no rank be silent for, and no store."""
SLACK_S = 20.0
"""A rank must have raised so long after its deadline; the machine may be busy."""


def begin(backend: str, rank: int, world_size: int, place: str, pipe: Any) -> None:
    """What each process runs: says what came of each command."""
    from tenuto.errors import RanksError, TenutoError
    from tenuto.ranks.detection import find_ranks
    from tenuto.ranks.kv.shared_files import SharedFiles

    if backend == "tcp":
        import torch.distributed

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=place, RANK=str(rank), WORLD_SIZE=str(world_size))
        torch.distributed.init_process_group("gloo")
        ranks = find_ranks()
    else:
        ranks = find_ranks(SharedFiles(place, rank=rank, world_size=world_size))
    assert (ranks.rank, ranks.world_size) == (rank, world_size)
    doing = Doing(ranks)
    pipe.send("ready")
    while True:
        command, *arguments = pipe.recv()
        pipe.send("begun")
        began = time.monotonic()
        try:
            answer = ("ok", getattr(doing, command)(*arguments))
        except TenutoError as error:
            told = (error.ranks, error.phase) if isinstance(error, RanksError) else ((), "")
            answer = (type(error).__name__, error.message, *told)
        pipe.send((*answer, time.monotonic() - began))


class Doing:
    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        self.agreement: Any = None

    def handshake(self, facts: dict[str, str], seconds: float = DEADLINE_S) -> str:
        from tenuto.ranks.agreement import Agreement
        from tenuto.ranks.contract import Settings

        settings = Settings(beat_s=0.05, dead_after_s=DEAD_S, answer_s=2.0, probe_s=0.2)
        self.agreement = Agreement.open(self.ranks, facts, seconds, settings)
        return self.agreement.session.id

    def gather(self, data: bytes, seconds: float = DEADLINE_S) -> list[bytes]:
        self.agreement.report("gathering")
        with self.agreement.round("save") as round:
            return round.all_gather(data, seconds)

    def vote(self, ok: bool, seconds: float = DEADLINE_S) -> dict[int, str]:
        with self.agreement.round("restore") as round:
            return dict(round.vote(ok, "not whole", seconds).reasons)

    def want(self) -> None:
        self.agreement.at(0, DEADLINE_S)
        self.agreement.request_save("a signal")

    def promise(self) -> int:
        end = time.monotonic() + SLACK_S
        while self.agreement.agreed_save is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.agreement.agreed_save.step

    def arrive(self, seconds: float = DEADLINE_S) -> tuple[int, str] | None:
        proposal = self.agreement.at(self.agreement.agreed_save.step, seconds)
        return proposal and (proposal.step, proposal.reason)

    def leave(self) -> None:
        self.agreement.close("ValueError: its own trouble")


@dataclass
class Process:
    process: Any
    pipe: Any
    rank: int

    def tell(self, *command: Any) -> None:
        """Returns once it has begun."""
        self.pipe.send(command)
        assert self.heard() == "begun"

    def leave_word(self, *command: Any) -> None:
        """For a process that is stopped."""
        self.pipe.send(command)

    def heard(self, seconds: float = 60.0) -> Any:
        assert self.pipe.poll(seconds), f"rank {self.rank} hangs"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()


@dataclass
class Job:
    """The processes of one job. As a context manager it kills what is left of them."""

    backend: str
    world_size: int
    place: str
    processes: list[Process] = field(default_factory=list)

    @classmethod
    def start(cls, backend: str, world_size: int, directory: Path) -> Job:
        job = cls(backend, world_size, str(free_port()) if backend == "tcp" else str(directory / "ranks"))
        return job.restarted()

    def restarted(self) -> Job:
        """Another incarnation at the same place."""
        other = Job(self.backend, self.world_size, self.place)
        other.processes = [other.process(rank) for rank in range(self.world_size)]
        for process in other.processes:
            assert process.heard() == "ready"
        return other

    def process(self, rank: int, world_size: int | None = None) -> Process:
        context = forked.context()
        here, there = context.Pipe()
        arguments = (self.backend, rank, world_size or self.world_size, self.place, there)
        process = context.Process(target=begin, args=arguments, daemon=True)
        process.start()
        there.close()
        return Process(process, here, rank)

    def others(self, *without: int) -> list[Process]:
        return [process for process in self.processes if process.rank not in without]

    def all(self, *command: Any) -> list[Any]:
        """What each returns."""
        for process in self.processes:
            process.tell(*command)
        return [process.heard()[1] for process in self.processes]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.process.is_alive():
                process.signal(signal.SIGKILL)
