"""`tenuto key`: the keys of a sealed repository."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import agreed
from tenuto.cli.console.where import default_place
from tenuto.cli.views.run_listing import SEALED
from tenuto.errors import KeyMissing, RemovalRefused, UsageError, typed
from tenuto.printable import clean
from tenuto.units import count

if TYPE_CHECKING:
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo
    from tenuto.seal.keys import KeyRing, Slot
    from tenuto.seal.secret_sources import Lock, Secret

EXAMPLES = examples(
    "tenuto key add /data/checkpoints --key-file tenuto.key   # made if it is new",
    "tenuto key add /data/checkpoints --passphrase --with tenuto.key",
    "tenuto key rm /data/checkpoints --slot 3f2a",
    "tenuto key rotate /data/checkpoints --key-file tenuto.key",
    "tenuto key trust /data/checkpoints 500   # saved without the key, and yours all the same",
)


class Action(StrEnum):
    """The actions on keys."""

    add = "add"
    rm = "rm"
    rotate = "rotate"
    trust = "trust"
    ls = "ls"


KeyFile = Annotated[
    list[str] | None, typer.Option("--key-file", metavar="FILE", help="add, rotate: 32 bytes in a file.")
]
Passphrase = Annotated[bool, typer.Option("--passphrase", help="add: a passphrase; it is asked for.")]
Variable = Annotated[str | None, typer.Option("--env", metavar="NAME", help="add: 32 bytes in base64, in a variable.")]
Kms = Annotated[str | None, typer.Option("--kms", metavar="ID", help="add: a key of AWS KMS.")]
Vault = Annotated[str | None, typer.Option("--vault", metavar="PATH", help="add: a transit key of HashiCorp Vault.")]
Opens = Annotated[
    str | None,
    typer.Option(
        "--with", metavar="KEY", help="add, trust: what opens it now: a file or env:NAME; else as in a script."
    ),
]
SlotId = Annotated[str | None, typer.Option("--slot", metavar="ID", help="rm: the slot, or how its id begins.")]


def key(
    action: Annotated[Action, typer.Argument(metavar="add|rm|rotate|trust|ls", help="What to do.", show_default=False)],
    where: Annotated[str | None, typer.Argument(metavar="WHERE", help="The repository.", show_default=False)] = None,
    step: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="trust: this one alone.", show_default=False)
    ] = None,
    *,
    run: options.Run = None,
    key_file: KeyFile = None,
    passphrase: Passphrase = False,
    env: Variable = None,
    kms: Kms = None,
    vault: Vault = None,
    opens: Opens = None,
    slot: SlotId = None,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Manage the keys of a sealed repository.

    Each slot opens the repository by itself. rotate draws a new key for what is saved from now on; what is there stays
    readable. It needs the secret of every slot: files, variables, services; a passphrase is asked for.

    Once there is a key, what it has not sealed is refused, unless it lay there before. trust has the key vouch for what
    was put without it since, as it lies there now: one checkpoint with its notes, or everything.
    """
    given = _given(key_file or [], passphrase, env, kms, vault)
    _check_options(action, given, opens, slot)
    if action is not Action.trust and (step is not None or run is not None):
        raise UsageError(f"{action} is about the whole repository", subject=step or "--run", hint="leave it out")
    repo = repository(where if where is not None else default_place())
    if action is Action.ls:
        _show(repo, repo.read_ring()[1], json)
    elif action is Action.trust:
        _trust(repo, None if step is None else options.checkpoint(repo, run, step), opens, yes, json)
    elif action is Action.add:
        _add(repo, given[0], opens, json)
    elif action is Action.rm:
        assert slot is not None, "the options were checked"
        _remove(repo, slot, yes, json)
    else:
        _rotate(repo, key_file or [], yes, json)


Source = tuple[str, Callable[[], "Secret"]]
"""An option, and what makes a new slot's secret."""


def _given(files: Sequence[str], passphrase: bool, env: str | None, kms: str | None, vault: str | None) -> list[Source]:
    from tenuto.seal import secret_sources as sources

    found: list[Source] = [("--key-file", partial(_file, file)) for file in files]
    if passphrase:
        found.append(("--passphrase", lambda: sources.Passphrase(_ask("New passphrase", twice=True))))
    if env is not None:
        found.append(("--env", partial(sources.from_variable, env)))
    if kms is not None:
        found.append(("--kms", partial(sources.Kms, kms)))
    if vault is not None:
        found.append(("--vault", partial(sources.Vault, vault)))
    return found


def _check_options(action: Action, given: Sequence[Source], opens: str | None, slot: str | None) -> None:
    """Raises UsageError for an option that this action does not take, or lacks."""
    kinds = "--key-file FILE, --passphrase, --env NAME, --kms ID or --vault PATH"
    if action is Action.add and len(given) != 1:
        raise UsageError(f"add makes one slot: give one of {kinds}", subject="add", hint="tenuto key --help")
    if (action is Action.rm) != (slot is not None):
        raise UsageError(
            "which slot?" if slot is None else "--slot is for rm", subject="--slot", hint="tenuto key ls WHERE"
        )
    files = action is Action.rotate and all(name == "--key-file" for name, _ in given)
    if (given and not files and action is not Action.add) or (opens and action not in (Action.add, Action.trust)):
        name = given[0][0] if given and not files else "--with"
        raise UsageError(f"{name} has no effect with {action}", subject=name, hint="tenuto key --help")


def _file(name: str) -> Secret:
    from tenuto.seal.secret_sources import from_file, make_file

    if Path(name).expanduser().exists():
        return from_file(name)
    made = make_file(name)
    output.story(f"{made.words} is new: keep a copy of it, away from the repository")
    return made


def _ask(question: str, *, twice: bool = False) -> str:
    """Asks for a passphrase on the terminal; it is never part of a command line, which others can see."""
    import getpass

    if not sys.stdin.isatty():
        raise UsageError(
            "there is no terminal to ask for a passphrase on",
            subject="--passphrase",
            hint="for a passphrase that opens it: TENUTO_PASSPHRASE",
        )
    text = getpass.getpass(f"{clean(question)}: ")
    if twice and getpass.getpass("Once more: ") != text:
        raise UsageError("the two are not alike", subject="--passphrase", hint="try again; nothing was done")
    return text


# --------------------------------------------------------------------------------------------------


def _add(repo: Repo, source: Source, opens: str | None, json: bool) -> None:
    from tenuto.repo.keys import change_ring, find_key, secret_from, without_code
    from tenuto.repo.repository import now_text
    from tenuto.seal.keys import first_ring, new_slot, open_ring, with_slot

    there = repo.read_ring()[1]
    asked: list[Secret] = []
    if there is not None and there.slots:
        asked = [secret_from(opens)] if opens is not None else _asked(repo, there)
        if asked:
            open_ring(there, asked)  # before anything new is made
    new = new_slot(repo.id, source[1](), now_text())
    before: dict[str, bytes] = {}

    def change(ring: KeyRing | None) -> KeyRing:
        if ring is None or not ring.slots:
            before.update(without_code(repo))
            return first_ring(repo.id, new, frozenset(before.values()), ring)
        if any(slot.id == new.id for slot in ring.slots):
            return ring
        return with_slot(ring, open_ring(ring, asked) if asked else find_key(repo), new)

    ring = change_ring(repo, change)
    if json:
        output.document("key", {"where": repo.url, "action": "add", "slot": new.id, **_json(ring)})
        return
    output.line(f"slot {new.id[:8]} ({_words(new.lock)}) opens {repo.url}")
    plain = _checkpoints(before)
    if plain:
        again = typed("tenuto", "repack", repo.url, "--encoding", "plain")
        output.story(f"note: plain from before, and trusted as it lies there now: {count(plain, 'checkpoint')}")
        output.story(f"hint: {again} seals those of a run that has ended")
    if len(ring.slots) == 1:
        output.story("note: it is the only slot: what is sealed is lost with it. A second one, kept elsewhere, is wise")


def _asked(repo: Repo, ring: KeyRing) -> list[Secret]:
    """Returns a passphrase from the terminal where neither environment nor services have what opens the ring."""
    from tenuto.repo.keys import find_key
    from tenuto.seal.secret_sources import Passphrase

    try:
        find_key(repo)
    except KeyMissing:
        if not sys.stdin.isatty() or not any(slot.lock.kind == "passphrase" for slot in ring.slots):
            raise
        return [Passphrase(_ask(f"Passphrase of {repo.url}"))]
    return []


def _checkpoints(names: Iterable[str]) -> int:
    return sum(name.startswith("runs/") and name.endswith("/manifest.json") for name in names)


def _trust(repo: Repo, id: CheckpointId | None, opens: str | None, yes: bool, json: bool) -> None:
    """Has the key vouch for what has no code, as it lies there now."""
    from tenuto.repo.keys import change_ring, find_key, ring_of, secret_from, without_code
    from tenuto.seal.keys import open_ring, vouching

    ring = ring_of(repo)
    asked = [secret_from(opens)] if opens is not None else _asked(repo, ring)
    repo.keys = open_ring(ring, asked) if asked else find_key(repo)
    found = without_code(repo, id)
    for name in found:
        output.story(f"  {name}")
    what = "everything" if id is None else str(id)
    if found and agreed(f"Vouch for {count(len(found), 'object')} that no key has made, as they lie there?", yes=yes):

        def change(now: KeyRing | None) -> KeyRing:
            assert now is not None, "a key ring is replaced, and never removed"
            return vouching(now, open_ring(now, asked) if asked else find_key(repo), frozenset(found.values()))

        change_ring(repo, change)
    elif found:
        return
    if json:
        output.document("key", {"where": repo.url, "action": "trust", "vouched": sorted(found), **_json(ring)})
    elif found:
        output.line(f"the key vouches for {count(len(found), 'object')}, {count(_checkpoints(found), 'checkpoint')}")
    else:
        output.line(f"nothing to do: the key vouches for {what} already")


def _remove(repo: Repo, slot: str, yes: bool, json: bool) -> None:
    from tenuto.repo.keys import change_ring, ring_of
    from tenuto.seal.keys import without_slot

    ring = ring_of(repo)
    found = _slot(repo, ring, slot)
    last = len(ring.slots) == 1
    if last and not yes:
        raise RemovalRefused(
            f"slot {found.id[:8]} ({_words(found.lock)}) is the last one: without it nobody, you included, can read "
            f"again what was sealed in {repo.url}",
            subject=found.id,
            hint=f"to destroy all of it: {typed('tenuto', 'key', 'rm', repo.url, '--slot', found.id[:8], '--yes')}",
        )
    if not agreed(f"Remove slot {found.id[:8]} ({_words(found.lock)})?", yes=yes):
        return

    def change(now: KeyRing | None) -> KeyRing:
        assert now is not None, "a key ring is replaced, and never removed"
        if not last and [one.id for one in now.slots] == [found.id]:
            raise RemovalRefused(
                f"slot {found.id[:8]} has become the last one meanwhile",
                subject=found.id,
                hint=typed("tenuto", "key", "ls", repo.url),
            )
        return without_slot(now, found.id)

    left = change_ring(repo, change)
    if json:
        output.document("key", {"where": repo.url, "action": "rm", "slot": found.id, **_json(left)})
    elif not left.slots:
        output.line(f"slot {found.id[:8]} removed: the keys of {repo.url} are destroyed")
        output.story("note: copies of the repository, and versions that an object store keeps, may still have them")
    else:
        output.line(f"slot {found.id[:8]} removed")
        output.story("note: whoever has opened it may have kept the key. For what is saved from now on, draw another:")
        output.story(f"hint: {typed('tenuto', 'key', 'rotate', repo.url)}")


def _slot(repo: Repo, ring: KeyRing, beginning: str) -> Slot:
    found = [slot for slot in ring.slots if slot.id.startswith(beginning)]
    if len(found) != 1 or not beginning:
        raise UsageError(
            f"{'no' if not found else 'more than one'} slot begins with {beginning!r}",
            subject=beginning,
            hint=typed("tenuto", "key", "ls", repo.url),
        )
    return found[0]


def _rotate(repo: Repo, files: Sequence[str], yes: bool, json: bool) -> None:
    from tenuto.repo.keys import change_ring, from_environment, named_by, ring_of
    from tenuto.seal.keys import rotated
    from tenuto.seal.secret_sources import from_file

    before = ring_of(repo)
    given: list[Secret] = [*map(from_file, files), *from_environment(), *named_by(before)]
    _ask_for_passphrases(before, given)
    made = [rotated(before, given)]  # what is missing is said before the question

    def change(ring: KeyRing | None) -> KeyRing:
        assert ring is not None, "a key ring is replaced, and never removed"
        if ring in made:
            return ring
        if ring != before:
            made.append(rotated(ring, given))
        return made[-1]

    for slot in before.slots:
        output.story(f"  {slot.id[:8]}  {_words(slot.lock)}")
    if not agreed(f"Draw a new key, which these {len(before.slots)} slots open?", yes=yes):
        return
    ring = change_ring(repo, change)
    if json:
        output.document("key", {"where": repo.url, "action": "rotate", **_json(ring)})
    else:
        output.line(f"key {ring.key} seals what is saved from now on; older checkpoints stay readable")
        output.story("note: processes that train have to be started again to use it")
        output.story(f"hint: {typed('tenuto', 'repack', repo.url)} encrypts again what a run that has ended has saved")


def _ask_for_passphrases(ring: KeyRing, given: list[Secret]) -> None:
    """Asks for the passphrase of each slot that has one, unless the environment has it or there is no terminal."""
    from tenuto.seal.secret_sources import Passphrase

    for slot in ring.slots:
        if slot.lock.kind == "passphrase" and sys.stdin.isatty():
            text = _ask(f"Passphrase of slot {slot.id[:8]} (empty where TENUTO_PASSPHRASE has it)")
            given += [Passphrase(text)] if text else []


def _show(repo: Repo, ring: KeyRing | None, json: bool) -> None:
    if json:
        output.document("key", {"where": repo.url, "action": "ls", **_json(ring)})
    elif ring is None:
        output.line(f"{repo.url} has no keys: nothing in it is sealed")
    elif not ring.slots:
        output.line(f"the keys of {repo.url} were destroyed: what was sealed there cannot be read any more")
    else:
        from tenuto.maintenance.census import take_census

        output.line(f"key {ring.key} of {repo.url}, opened by any of:")
        output.line(output.rows([(slot.id[:8], f"{_words(slot.lock)}, since {slot.created}") for slot in ring.slots]))
        saves = [save for save in take_census(repo).saves.values() if save.state == "committed"]
        counted = [(state, sum(save.sealed == state for save in saves)) for state in SEALED]
        output.line(f"checkpoints: {', '.join(f'{number:,} {SEALED[state]}' for state, number in counted if number)}")


def _words(lock: Lock) -> str:
    names = {
        "file": "a key file",
        "environment": f"the environment variable {lock.name}",
        "passphrase": "a passphrase",
        "kms": f"AWS KMS, {lock.name}",
        "vault": f"HashiCorp Vault, {lock.name}",
    }
    return names[lock.kind]


def _json(ring: KeyRing | None) -> dict[str, Any]:
    slots = ring.slots if ring is not None else ()
    return {
        "key": ring.key if ring is not None else None,
        "slots": [
            {"id": slot.id, "kind": slot.lock.kind, "name": slot.lock.name, "created": slot.created} for slot in slots
        ],
    }
