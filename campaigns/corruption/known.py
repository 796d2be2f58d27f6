"""A fast path: what decoding untouched bytes gives is not found out again.

The decoders are pure: equal bytes give equal results. So while faults are judged, bytes that are exactly those of the
untouched store are decoded once; any others are decoded anew, and every length, digest and path that is checked before
decoding is checked in any case. Without it every verdict is the same, and a share of the faults is judged both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Final

from campaigns.simulated_processes import replacing
from tenuto.model import canonical_json, ids
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import index, manifest, safetensors
from tenuto.store.contract import check_name

_MOST: Final = 500


@contextmanager
def known(untouched: Iterable[bytes]) -> Iterator[None]:
    """Within the block untouched bytes are decoded once."""
    vouched = frozenset(untouched)
    open_seal = canonical_json.open_seal
    seals: dict[bytes, Any] = {}
    decode_manifest = manifest.decode_manifest
    decode_index: Callable[..., Any] = index.decode_index
    parse_header: Callable[..., Any] = safetensors.parse_header
    manifests: dict[tuple[bytes, CheckpointId], Any] = {}
    trees: set[int] = set()
    """Of the manifests above, which keep them alive."""
    indexes: dict[tuple[bytes, CheckpointId, int, int], Any] = {}
    headers: dict[tuple[bytes, int | None], Any] = {}

    def seal_of(data: bytes, *, name: str) -> Any:
        if data not in vouched:
            return open_seal(data, name=name)
        if data not in seals:
            seals[data] = open_seal(data, name=name)
        return seals[data]

    def manifest_of(data: bytes, id: CheckpointId, repository: str) -> Any:
        if data not in vouched:
            return decode_manifest(data, id, repository)
        if (data, id) not in manifests:
            found = manifests[data, id] = decode_manifest(data, id, repository)
            trees.add(id_of(getattr(found, "tree", None)))
        return manifests[data, id]

    def index_of(data: bytes, *, id: CheckpointId, rank: int, tree: Any, repository: str) -> Any:
        key = (data, id, rank, id_of(tree))
        if data not in vouched or id_of(tree) not in trees:
            return decode_index(data, id=id, rank=rank, tree=tree, repository=repository)
        if key not in indexes:
            indexes[key] = decode_index(data, id=id, rank=rank, tree=tree, repository=repository)
        return indexes[key]

    def header_of(block: Any, *, name: str, file_length: int | None = None, **rest: Any) -> Any:
        key = (bytes(block), file_length)
        if key in headers:
            return headers[key]
        found = parse_header(block, name=name, file_length=file_length, **rest)
        if len(headers) < _MOST:
            headers[key] = found
        return found

    with ExitStack() as stack:
        for pure in (
            check_name,
            ids.attempt_key,
            ids.step_key,
            ids.parse_attempt,
            ids.parse_step,
            ids.run_key,
        ):
            stack.enter_context(replacing(pure, lru_cache(10_000)(pure)))
        stack.enter_context(replacing(open_seal, seal_of))
        stack.enter_context(replacing(decode_manifest, manifest_of))
        stack.enter_context(replacing(decode_index, index_of))
        stack.enter_context(replacing(parse_header, header_of))
        yield


def id_of(value: object) -> int:
    return id(value)
