"""Stores that answer too early or act in the wrong order: the seeded protocol bugs above the file system."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tenuto.model.records import Receipt
from tenuto.store.contract import Bytes, Content, Store
from tenuto.store.wrappers.delegating import DelegatingStore


class PutLate(DelegatingStore):
    """Puts of names that end in `late` are acknowledged at once and done after the next put whose name ends in
    `after`; until then the writer sees them as if they were there."""

    def __init__(self, inner: Store, late: str, after: str) -> None:
        super().__init__(inner)
        self.late, self.after = late, after
        self.owed: dict[str, tuple[bytes, str]] = {}

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if name.endswith(self.late):
            self.owed[name] = (b"".join(bytes(piece) for piece in content.pieces()), token)
            return Receipt(name, content.length, self.url)
        receipt = self.inner.put_if_absent(name, content, token=token)
        if name.endswith(self.after):
            owed, self.owed = self.owed, {}
            for held, (data, by) in owed.items():
                self.inner.put_if_absent(held, Bytes(data), token=by)
        return receipt

    def get(self, name: str, *, limit: int) -> bytes:
        return self.owed[name][0] if name in self.owed else self.inner.get(name, limit=limit)


class TrashLate(PutLate):
    """The copy in the trash is put after the removal that it is to undo."""

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if not name.startswith("trash/"):
            return self.inner.put_if_absent(name, content, token=token)
        self.owed[name] = (b"".join(bytes(piece) for piece in content.pieces()), token)
        return Receipt(name, content.length, self.url)

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        super().delete(names)
        owed, self.owed = self.owed, {}
        for held, (data, by) in owed.items():
            self.inner.put_if_absent(held, Bytes(data), token=by)


class DeleteLate(DelegatingStore):
    """Deletions of names that end in `late` are acknowledged at once and done after the next deletion of others."""

    def __init__(self, inner: Store, late: str) -> None:
        super().__init__(inner)
        self.late = late
        self.owed: list[str] = []

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        wanted = list(names)
        held = [name for name in wanted if name.endswith(self.late)]
        rest = [name for name in wanted if not name.endswith(self.late)]
        self.owed += held
        if rest:
            self.inner.delete(rest)
            owed, self.owed = self.owed, []
            if owed:
                self.inner.delete(owed)
