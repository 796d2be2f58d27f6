"""Ranks on nodes of their own: what a node has not flushed is lost with that node, and nobody else's flush saves it.

A weaker promise than one machine's: there, whoever flushes a directory flushes all names in it. Here only the node that
made an entry, or wrote a file, can make it durable; and of a crash of some nodes the others lose nothing. But a
directory in which another node has made a name is no longer its maker's to lose: no file system that nodes share has
it in the memory of one of them then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from campaigns.persistence import Instant, Persistence, Variable
from tenuto.testing.recorder import Call
from tenuto.testing.simulated_disk import DiskImage


class NodePersistence(Persistence):
    """Replays calls that each have a node, from an empty disk or from `base`, all of it durable."""

    def __init__(self, base: DiskImage | None = None) -> None:
        super().__init__(base)
        self._entered: dict[tuple[int, str], int] = {}
        """Which node changed an entry last."""
        self._written: dict[int, int] = {}
        self._made: dict[int, tuple[int, str, int]] = {}
        """By directory: where its name stands, and the node that made it."""

    def replay(self, call: Call, number: int) -> None:
        match call.kind:
            case "fsync":
                if self._written.get(call.inode, call.node) == call.node:
                    super().replay(call, number)
                return
            case "fsync_directory":
                for (directory, name), history in self._entries.items():
                    if directory == call.inode and self._entered.get((directory, name), call.node) == call.node:
                        history.fail() if call.failed else history.flush()
                return
            case "create" | "pwrite" | "truncate" | "reserve":
                self._written[call.inode] = call.node
        if call.name:
            self._entered[call.directory, call.name] = call.node
            self._shared(call.directory, call.node)
        if call.kind == "mkdir":
            self._made[call.inode] = (call.directory, call.name, call.node)
        if call.source is not None:
            self._entered[call.source] = call.node
        super().replay(call, number)

    def _shared(self, directory: int, node: int) -> None:
        """A name is made there: where another node made the directory itself, that is durable, as are those above."""
        above, name, maker = self._made.get(directory, (-1, "", node))
        if maker != node:
            self._entries[above, name].flush()
        if above >= 0:
            self._shared(above, node)

    def instants(self) -> Iterator[Instant]:
        """What is possible after a crash of each set of nodes of which something can be lost."""
        whole = super().now()
        nodes = sorted({self._node_of(variable) for variable in whole.variables})
        if not nodes:
            yield whole
        for count in range(1, len(nodes) + 1):
            for crashed in combinations(nodes, count):
                found = super().now()
                found.variables = tuple(one for one in found.variables if self._node_of(one) in crashed)
                yield found

    def _node_of(self, variable: Variable) -> int:
        inode, part = variable.subject
        if variable.kind == "name":
            return self._entered.get((inode, str(part)), -1)
        return self._written.get(inode, -1)
