"""Every error that Tenuto raises, in one tree.

TenutoError
├── UsageError (ValueError)                 an argument or a combination of arguments makes no sense
│   ├── BadIndex (IndexError)               an index that a leaf which has not been read cannot take
│   ├── MetricNotLogged                     a policy needs a metric that nothing has logged
│   ├── PolicyConflict                      save_top_k, max_to_keep and the like contradict each other, or keep=
│   ├── RanksNotSupported                   several processes where one has to act, or that cannot meet
│   └── ForkedProcess                       a forked child used what its parent owns
├── MissingExtra (ImportError)              an optional dependency is absent; names the extra to install
├── UnsupportedPlatform (OSError)           this operating system or Python cannot hold the guarantees
├── StateError (TypeError)                  the training state cannot be represented or restored
│   ├── Unserialisable                      a value has no representation; names its path
│   ├── DuplicatePath                       two leaves share one path
│   ├── StateMismatch (ValueError)          structure, shape or dtype differs between checkpoint and target
│   └── ShardMismatch (ValueError)          ranks' shards of a leaf overlap, leave a hole, or disagree about what it is
├── RepositoryError
│   ├── NotARepository (FileNotFoundError)  there is no Tenuto repository
│   ├── FormatTooNew                        written by a newer format than this version reads
│   ├── RunNotFound (LookupError)           no such run; names those that exist
│   ├── CheckpointNotFound (LookupError)    no such checkpoint; names the nearest ones
│   ├── LeafNotFound (KeyError)             no such path in the checkpoint; names what lies near it
│   ├── NothingRestorable                   checkpoints exist, and none is whole
│   ├── RemovalRefused                      something still needs what was to be removed
│   ├── CopyDiverged                        a copy has something else under a name of its primary
│   ├── KeyMissing (LookupError)            no key was given for what is sealed, or the one given is too old
│   └── WrongKey (PermissionError)          none of the keys that were given opens the repository
├── CorruptionError (ValueError)            bytes are not what was saved; names leaf, object and offset
│   └── Tampered                            what is sealed or signed was altered, swapped or replayed; names the object
├── OwnershipError
│   ├── RunInUse                            another live process owns the run; names it
│   └── Superseded                          another process has claimed the run since; names it
├── SaveFailed                              a save did not commit; carries the cause
│   └── SaveTorn                            a fenced capture was written to while it copied; names the leaf
├── ScriptFailed                            a training script that was run did not do what it was run for
├── DeadlineExceeded (TimeoutError)         a wait ended without what it waited for; names who is missing
├── RanksError                              the processes of one job do not agree; names ranks and phase
│   ├── RanksMissing (TimeoutError)         ranks stopped, died or did not answer in time
│   ├── RankFailed                          another rank failed, and said why
│   ├── RanksDisagree                       ranks differ in what has to be equal; names what, and who says what
│   └── RankStoreLost (ConnectionError)     the store through which the ranks meet does not answer
└── StoreError (OSError)
    ├── AlreadyExists (FileExistsError)     put_if_absent found an object under the name
    ├── ObjectNotFound (FileNotFoundError)  no object under the name
    ├── StoreFull                           no space, or quota reached
    ├── StoreDenied (PermissionError)       permission denied, or the store is read-only
    ├── StoreUnreliable                     a flush to stable storage failed; the name is abandoned
    └── StoreUnavailable                    a passing fault; the only kind that is retried

Each error says what is concerned (`subject`) and the operator's next command (`hint`), and has the exit status
that the command line leaves with (`exit_code`).

Outside the tree is TenutoWarning (UserWarning): code that uses Tenuto in a way that may lose something or make a resume
inexact. What happens to saves and checkpoints is an event instead (`tenuto.events`).
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable

from tenuto.printable import clean_lines


class TenutoError(Exception):
    """Root of the tree. `subject` is the leaf, object, run or rank concerned; `hint` is what to type next."""

    exit_code = 1

    def __init__(self, message: str, *, subject: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject
        self.hint = hint

    def __str__(self) -> str:
        return clean_lines(self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}")


class TenutoWarning(UserWarning):
    """The class of every Python warning that Tenuto issues. Each points at the line of your code that it is about."""


def in_words(error: BaseException) -> str:
    """What one line says of any error: an error of ours without its hint, another one by its kind too."""
    return error.message if isinstance(error, TenutoError) else repr(error)


def typed(*words: object) -> str:
    """A command as a hint gives it: each word one word for a shell, whatever is in it."""
    return shlex.join(map(str, words))


def nearest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Returns the names that `name` was most likely meant to be, the likeliest first: those that end in it, then those
    spelled alike."""
    there = list(dict.fromkeys(names))
    ending = [one for one in there if one.endswith((f"/{name}", f".{name}"))] if name else []
    by_lower = {one.lower(): one for one in reversed(there)}
    alike = [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=most)]
    return list(dict.fromkeys([*ending, *alike]))[:most]


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Returns a hint that names the nearest of `names`; None if none is near."""
    near = [repr(one) for one in nearest(name, names)]
    return f"did you mean {' or '.join([', '.join(near[:-1]), near[-1]] if len(near) > 1 else near)}?" if near else None


def install(extra: str) -> str:
    """Returns what to type for an extra that is absent. Tenuto is installed from its checkout: no index has it yet."""
    return f"{typed('pip', 'install', f'.[{extra}]')}  # in Tenuto's checkout"


class UsageError(TenutoError, ValueError):
    exit_code = 2


class BadIndex(UsageError, IndexError):
    pass


class MetricNotLogged(UsageError):
    pass


class PolicyConflict(UsageError):
    pass


class RanksNotSupported(UsageError):
    pass


class ForkedProcess(UsageError):
    pass


class MissingExtra(TenutoError, ImportError):
    exit_code = 3


class UnsupportedPlatform(TenutoError, OSError):
    exit_code = 3


class StateError(TenutoError, TypeError):
    exit_code = 4


class Unserialisable(StateError):
    pass


class DuplicatePath(StateError):
    pass


class StateMismatch(StateError, ValueError):
    pass


class ShardMismatch(StateError, ValueError):
    pass


class RepositoryError(TenutoError):
    exit_code = 10


class NotARepository(RepositoryError, FileNotFoundError):
    exit_code = 10


class FormatTooNew(RepositoryError):
    exit_code = 14


class RunNotFound(RepositoryError, LookupError):
    exit_code = 11


class CheckpointNotFound(RepositoryError, LookupError):
    exit_code = 11


class LeafNotFound(RepositoryError, KeyError):
    exit_code = 11


class NothingRestorable(RepositoryError):
    exit_code = 12


class RemovalRefused(RepositoryError):
    exit_code = 16


class CopyDiverged(RepositoryError):
    exit_code = 25


class KeyMissing(RepositoryError, LookupError):
    exit_code = 26


class WrongKey(RepositoryError, PermissionError):
    exit_code = 26


class CorruptionError(TenutoError, ValueError):
    """`object`: the name of the one that is damaged, where it is known; `subject` may be a leaf in it."""

    exit_code = 12

    def __init__(
        self, message: str, *, subject: str | None = None, hint: str | None = None, object: str | None = None
    ) -> None:
        super().__init__(message, subject=subject, hint=hint)
        self.object = object


class Tampered(CorruptionError):
    pass


class OwnershipError(TenutoError):
    exit_code = 13


class RunInUse(OwnershipError):
    pass


class Superseded(OwnershipError):
    pass


class SaveFailed(TenutoError):
    exit_code = 15


class SaveTorn(SaveFailed):
    pass


class ScriptFailed(TenutoError):
    exit_code = 22


class DeadlineExceeded(TenutoError, TimeoutError):
    exit_code = 17


class RanksError(TenutoError):
    """`ranks` are those that are missing, failed or differ; `phase` is what was being agreed on."""

    exit_code = 23

    def __init__(
        self,
        message: str,
        *,
        subject: str | None = None,
        hint: str | None = None,
        ranks: tuple[int, ...] = (),
        phase: str = "",
    ) -> None:
        super().__init__(message, subject=subject, hint=hint)
        self.ranks = ranks
        self.phase = phase


class RanksMissing(RanksError, TimeoutError):
    exit_code = 17


class RankFailed(RanksError):
    pass


class RanksDisagree(RanksError):
    pass


class RankStoreLost(RanksError, ConnectionError):
    """`lasting` is set where asking again cannot help."""

    exit_code = 17
    lasting = False


class StoreError(TenutoError, OSError):
    exit_code = 18


class AlreadyExists(StoreError, FileExistsError):
    pass


class ObjectNotFound(StoreError, FileNotFoundError):
    pass


class StoreFull(StoreError):
    exit_code = 19


class StoreDenied(StoreError, PermissionError):
    pass


class StoreUnreliable(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass
