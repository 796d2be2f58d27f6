"""The names of all objects in a store, and the file names allowed in a checkpoint's directory."""

from __future__ import annotations

import re
from typing import Final

from tenuto.errors import CorruptionError, UsageError
from tenuto.model.ids import CheckpointId, attempt_key, parse_attempt, parse_step, run_key, step_key
from tenuto.store.contract import PARTIAL, final_name

REPOSITORY: Final = "tenuto.json"
REPOSITORY_COPY: Final = "tenuto.copy.json"
"""Says the same as REPOSITORY."""
MEMBER: Final = "tenuto-member.json"
"""In a place that is not the home: identifies the repository it belongs to."""
PLACES: Final = "places"
"""In the home: the list of the other places."""
COPIES: Final = "copies"
"""In the home: the list of copies elsewhere, which it neither reads nor writes."""
RUNS: Final = "runs"
BEGIN: Final = "begin.json"
MANIFEST: Final = "manifest.json"
ATTEMPT: Final = "attempt.json"
BOXES: Final = "boxes.index"
NOTES: Final = "notes"
PROOFS: Final = "certified"
KEYS: Final = "keys"
STAGED: Final = f"{PARTIAL}repair-"
"""Marks what a repair has put beside a damaged object: all of its bytes, until they have their own name."""
"""The key rings of a sealed repository, `keys/<n>.json`: the highest number counts."""

_PACKS: Final = (".safetensors", ".pack")
_PART: Final = re.compile(
    r"rank-[0-9]{5,}(\.index|(\.[0-9]{2,})?\.pack|(\.home)?(\.[0-9]{2,})?\.safetensors)", re.ASCII
)
_HOME_PACK: Final = re.compile(r"rank-[0-9]{5,}\.home(\.[0-9]{2,})?\.safetensors", re.ASCII)
_PLACE: Final = re.compile(r"[0-9a-f]{12}-[0-9a-f]{32}\.json", re.ASCII)
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}", re.ASCII)
_RESERVED: Final = frozenset({BEGIN, MANIFEST, NOTES})
_KEY: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NUMBERED: Final = re.compile(r"([1-9][0-9]{0,17})\.json", re.ASCII)


def run_directory(run: str) -> str:
    return f"{RUNS}/{run_key(run)}"


def attempt_directory(run: str, attempt: int) -> str:
    return f"{run_directory(run)}/{attempt_key(attempt)}"


def attempt_name(run: str, attempt: int) -> str:
    return f"{attempt_directory(run, attempt)}/{ATTEMPT}"


def lease_directory(run: str, attempt: int) -> str:
    return f"{attempt_directory(run, attempt)}/lease"


def begin_name(id: CheckpointId) -> str:
    return f"{id.directory}/{BEGIN}"


def index_file(rank: int) -> str:
    return f"rank-{rank:05d}.index"


def pack_file(rank: int, number: int, *, home: bool = False) -> str:
    """Returns the name of a rank's pack. `home`: of one that `is_home_pack`, which are numbered by themselves."""
    further = f".{number:02d}" if number else ""
    return f"rank-{rank:05d}{'.home' if home else ''}{further}.safetensors"


def encoded_pack_file(rank: int, number: int) -> str:
    """Returns the name of a rank's pack of encoded chunks."""
    return f"rank-{rank:05d}{f'.{number:02d}' if number else ''}.pack"


def notes_directory(id: CheckpointId) -> str:
    return f"{id.directory}/{NOTES}"


def proofs_directory(key: str) -> str:
    return f"{PROOFS}/{key}"


def is_proof(name: str) -> bool:
    """Returns whether an object has the name of what `certify` has proven: `certified/<key>/<n>.json`."""
    parts = name.split("/")
    return (
        len(parts) == 3
        and parts[0] == PROOFS
        and bool(_KEY.fullmatch(parts[1]))
        and parse_numbered(parts[2]) is not None
    )


def is_key_ring(name: str) -> bool:
    directory, _, number = name.partition("/")
    return directory == KEYS and parse_numbered(number) is not None


def attempt_trash(run: str, attempt: int) -> str:
    return f"trash/{run_key(run)}/{attempt_key(attempt)}"


def trash_directory(id: CheckpointId) -> str:
    """Returns the directory for the manifest's copy after `rm`, until gc takes the packs too."""
    return f"{attempt_trash(id.run, id.attempt)}/{step_key(id.step)}"


def tombstone_directory(id: CheckpointId) -> str:
    return f"tombstones/{id.run}/{attempt_key(id.attempt)}/{step_key(id.step)}"


def numbered(directory: str, number: int) -> str:
    return f"{directory}/{number}.json"


def parse_numbered(file: str) -> int | None:
    """Returns the number in `<n>.json`, None for any other spelling."""
    found = _NUMBERED.fullmatch(file)
    return int(found[1]) if found else None


def is_note(file: str) -> bool:
    """Returns whether a file in a checkpoint's directory is a note: `notes/<n>.json`."""
    directory, _, number = file.partition("/")
    return directory == NOTES and parse_numbered(number) is not None


def is_place(file: str) -> bool:
    """Returns whether an object in the list of places has such a name."""
    return _PLACE.fullmatch(file) is not None


def is_file(name: object) -> bool:
    """Returns whether `name` may be a pack or an index in a checkpoint's directory; never one that leads out of it."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None and name not in _RESERVED


def is_part(file: str) -> bool:
    """Returns whether Tenuto's saves use this name for a pack or an index."""
    return file == BOXES or _PART.fullmatch(file) is not None


def check_file(name: object, *, subject: str) -> str:
    """Returns `name` if `is_file`, else raises CorruptionError. `subject`: the object that contains it."""
    if not isinstance(name, str) or not is_file(name):
        raise CorruptionError(
            f"{subject} names {str(name)[:120]!r}, which no object of a checkpoint can be called", subject=subject
        )
    return name


def is_pack(name: str) -> bool:
    """Returns whether `name` is a pack's: packs are in the places declared for them, which may not include the home."""
    return name.endswith(_PACKS) and _in_step(name)


def is_home_pack(name: str) -> bool:
    """Returns whether `name` is that of a pack with what ranks on several nodes need, which the home has too."""
    return _HOME_PACK.fullmatch(name.rpartition("/")[2]) is not None and _in_step(name)


def is_staged(name: str) -> bool:
    """Returns whether a leftover is what a repair has staged: the last whole copy, where the object itself is gone."""
    return STAGED in name.rpartition("/")[2]


def is_index(name: str) -> bool:
    return name.endswith(".index") and _in_step(name)


def is_copied(name: str) -> bool:
    """Returns whether an object of the home is copied to the places of packs: indexes, what is known of a checkpoint,
    refs, keys, and what lies in the trash, on whose packs others may rest."""
    parts = name.split("/")
    if parts[0] in ("refs", "trash") or is_key_ring(name):
        return True
    rest = parts[4:]
    known = rest[:1] == [NOTES] or (len(rest) == 1 and (rest[0] == MANIFEST or is_index(name)))
    return known and is_step("/".join(parts[:4]))


def _in_step(name: str) -> bool:
    return is_step(name.rpartition("/")[0])


def is_step(prefix: str) -> bool:
    """Returns whether `prefix` is the directory of a save."""
    parts = prefix.split("/")
    return (
        len(parts) == 4
        and parts[0] == RUNS
        and parse_attempt(parts[2]) is not None
        and parse_step(parts[3]) is not None
    )


def may_be_replicated(name: str) -> bool:
    """Returns whether an object, or a temporary of it, may be in places other than the home."""
    final = final_name(name)
    return is_pack(final) or is_copied(final) or (final.endswith(f"/{BEGIN}") and _in_step(final))


def step_of(name: str) -> str | None:
    """Returns the directory of an object's save, None outside any save."""
    directory = "/".join(name.split("/")[:4])
    return directory if is_step(directory) and name != directory else None


def save_of(name: str) -> CheckpointId | None:
    """Returns the save that an object lies in, None outside any save."""
    directory = step_of(name)
    if directory is None:
        return None
    _, run, attempt, step = directory.split("/")
    number, steps = parse_attempt(attempt), parse_step(step)
    try:
        return None if number is None or steps is None else CheckpointId(run, number, steps)
    except UsageError:
        return None


def attempt_of(name: str) -> str | None:
    """Returns the directory of an object's attempt, None outside any attempt."""
    parts = name.split("/")
    return "/".join(parts[:3]) if len(parts) > 3 and parts[0] == RUNS and parse_attempt(parts[2]) is not None else None
