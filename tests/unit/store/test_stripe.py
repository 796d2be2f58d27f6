"""Several places as one: what is where, what is noticed when one of them is lost, and what a crash leaves."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from itertools import permutations

import pytest

from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError, UsageError
from tenuto.store.contract import Bytes, leftovers_of
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.store.wrappers.stripe import Stripe
from tenuto.store.wrappers.striped_object import Descriptor

PART = 2**16
DATA = os.urandom(10 * PART + 777)


@pytest.fixture
def mounts(tmp_path):
    return [tmp_path / name for name in ("one", "two", "three")]


def stripe_of(mounts, part=PART):
    return Stripe(*map(str, mounts), part=part)


@pytest.fixture
def store(mounts):
    store = stripe_of(mounts)
    store.put_if_absent("a/pack", Bytes(DATA), token="t0")
    store.put_if_absent("a/manifest", Bytes(b"small"), token="t0")
    return store


def unmounted(mount):
    """What is left of a mount point: an empty directory."""
    mount.rename(mount.with_name(f"{mount.name} elsewhere"))
    mount.mkdir()


def files(mount):
    return sorted(str(path.relative_to(mount)) for path in mount.rglob("*") if path.is_file())


def test_large_objects_are_dealt_out_and_small_ones_are_everywhere(store, mounts):
    shares = [sum(path.stat().st_size for path in (mount / "stripes").rglob("*.*")) for mount in mounts]
    assert sum(shares) == len(DATA) and max(shares) - min(shares) <= PART
    for mount in mounts:
        assert (mount / "objects/a/manifest").read_bytes() == b"small"
        assert (mount / "objects/a/pack").stat().st_size == Descriptor.LENGTH
    assert [(entry.name, entry.length) for entry in store.walk("")] == [("a/manifest", 5), ("a/pack", len(DATA))]
    assert store.stat("a/pack").length == len(DATA)
    assert store.get("a/pack", limit=len(DATA)) == DATA


def test_the_order_of_the_places_does_not_matter(store, mounts):
    for order in permutations(mounts):
        assert stripe_of(order).get("a/pack", limit=len(DATA)) == DATA
    again = stripe_of(mounts[::-1])
    again.put_if_absent("b/pack", Bytes(DATA), token="t1")
    assert stripe_of(mounts).get("b/pack", limit=len(DATA)) == DATA


def test_another_length_of_parts_is_for_new_objects(store, mounts):
    another = stripe_of(mounts, part="8KiB")
    another.put_if_absent("b/pack", Bytes(DATA), token="t1")
    assert another.get("a/pack", limit=len(DATA)) == store.get("b/pack", limit=len(DATA)) == DATA


def test_it_opens_by_its_url_too(store, mounts):
    assert store.url == "stripe://" + ",".join(map(str, mounts))
    assert open_store(store.url).get("a/pack", limit=len(DATA)) == DATA


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("known", [True, False])
def test_a_mount_that_is_gone_is_noticed_and_nothing_is_written_there(store, mounts, lost, known):
    unmounted(mounts[lost])
    store = store if known else stripe_of(mounts)
    assert store.get("a/manifest", limit=9) == b"small", "what is whole stays readable"
    assert [entry.name for entry in store.walk("")] == ["a/manifest", "a/pack"]
    assert store.children("a").objects == ("manifest", "pack")
    with pytest.raises(StoreError, match=str(mounts[lost])) as caught:
        store.get("a/pack", limit=len(DATA))
    assert "findmnt" in caught.value.hint and not isinstance(caught.value, ObjectNotFound)
    for act in (
        lambda: store.put_if_absent("b", Bytes(b"1"), token="t0"),
        lambda: store.put_if_absent("b/pack", Bytes(DATA), token="t0"),
        lambda: store.delete(["a/manifest"]),
        lambda: store.probe(),
    ):
        with pytest.raises(StoreError, match=str(mounts[lost])):
            act()
    assert files(mounts[lost]) == []
    with pytest.raises(ObjectNotFound):
        store.get("nothing", limit=9)


def test_a_mount_that_comes_back_is_used_again(store, mounts):
    unmounted(mounts[0])
    with pytest.raises(StoreError):
        store.delete(["a/manifest"])
    mounts[0].rmdir()
    (mounts[0].parent / "one elsewhere").rename(mounts[0])
    assert store.get("a/pack", limit=len(DATA)) == DATA
    store.delete(["a/pack", "a/manifest"])
    assert not list(store.walk("", leftovers=True))
    assert all(files(mount) == ["tenuto-stripe.json"] for mount in mounts)


def test_all_mounts_gone_are_no_empty_stripe_to_whoever_has_seen_them(store, mounts):
    for mount in mounts:
        unmounted(mount)
    with pytest.raises(StoreError, match="is not the location of this stripe that it was"):
        list(store.walk(""))
    with pytest.raises(StoreError, match="is not the location of this stripe that it was"):
        store.put_if_absent("b", Bytes(b"1"), token="t0")
    assert not any(files(mount) for mount in mounts)


def test_a_place_of_another_stripe_is_refused(store, mounts, tmp_path):
    others = [tmp_path / "four", tmp_path / "five", tmp_path / "six"]
    stripe_of(others).put_if_absent("x", Bytes(b"1"), token="t0")
    mixed = stripe_of([mounts[0], mounts[1], others[2]])
    for act in (lambda: mixed.put_if_absent("b", Bytes(b"1"), token="t0"), lambda: list(mixed.walk(""))):
        with pytest.raises(StoreError, match="are not two locations of one stripe"):
            act()
    with pytest.raises(StoreError, match="one of 3 locations"):
        list(stripe_of(mounts[:2]).walk(""))


def test_a_directory_that_holds_something_is_not_taken_over(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "tenuto.json").write_text("{}")
    with pytest.raises(StoreError, match="two holds something already"):
        stripe_of([tmp_path / "one", tmp_path / "two"]).put_if_absent("x", Bytes(b"1"), token="t0")
    assert not (tmp_path / "one").exists() or files(tmp_path / "one") == []


@pytest.mark.parametrize("wrong", [{"part": 5000}, {"part": "none"}])
def test_parts_that_make_no_sense(mounts, wrong):
    with pytest.raises(UsageError):
        Stripe(*mounts, **wrong)


def test_places_that_make_no_stripe(mounts, tmp_path):
    for places in ([], mounts[:1], [mounts[0], mounts[0]], [mounts[0], tmp_path / "a,b"]):
        with pytest.raises(UsageError):
            Stripe(*places)


def test_a_stripe_whose_beginning_was_cut_short_is_begun_again(store, mounts, tmp_path):
    """Records are put from the last place to the first; a process may die in between."""
    fresh = [tmp_path / "x", tmp_path / "y", tmp_path / "z"]
    fresh[2].mkdir()
    body = {"stripe": "ab" * 16, "place": 2, "places": 3}
    (fresh[2] / "tenuto-stripe.json").write_text(json.dumps(body))
    assert list(stripe_of(fresh).walk("")) == []
    stripe_of(fresh).put_if_absent("a", Bytes(b"1"), token="t0")
    found = [json.loads((place / "tenuto-stripe.json").read_text()) for place in fresh]
    assert [one["place"] for one in found] == [0, 1, 2]
    assert {(one["stripe"], one["places"]) for one in found} == {("ab" * 16, 3)}


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_stripe_that_another_thread_begins_meanwhile_has_lost_nothing(mounts, late):
    class Meanwhile(LocalStore):
        def get(self, name, *, limit):
            try:
                return super().get(name, limit=limit)
            except ObjectNotFound:
                if not begun:
                    begun.append(name)
                    store.put_if_absent("a/claim", Bytes(b"theirs"), token="t0")
                raise

    begun: list[str] = []
    store = Stripe(*(Meanwhile(mount) if number == late else LocalStore(mount) for number, mount in enumerate(mounts)))
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a/claim", Bytes(b"ours"), token="t1")
    assert begun and store.get("a/claim", limit=10) == b"theirs"


def test_a_damaged_record_is_a_lost_place(store, mounts):
    (mounts[1] / "tenuto-stripe.json").write_bytes(b"?")
    with pytest.raises(StoreError, match=str(mounts[1])):
        stripe_of(mounts).put_if_absent("b", Bytes(b"1"), token="t0")


def test_a_place_that_cannot_be_read_does_not_keep_small_objects_from_being_read(request):
    class Failing(DelegatingStore):
        broken = False

        def open(self, name):
            if self.broken and name.startswith("objects/"):
                raise StoreError("the disk does not answer", subject=name)
            return super().open(name)

    first = Failing(MemoryStore(request.node.nodeid + " 1"))
    store = Stripe(first, MemoryStore(request.node.nodeid + " 2"))
    store.put_if_absent("x", Bytes(b"1"), token="t0")
    first.broken = True
    assert store.get("x", limit=1) == b"1"


def test_missing_and_damaged_parts_are_damage_of_the_object(store, mounts):
    share = next((mounts[1] / "stripes").rglob("*.*"))
    whole = share.read_bytes()
    share.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match="a/pack"):
        store.get("a/pack", limit=len(DATA))
    share.unlink()
    with pytest.raises(CorruptionError, match=f"the parts of a/pack in {mounts[1]} are missing"):
        store.open("a/pack")
    descriptor = mounts[0] / "objects/a/pack"
    data = bytearray(descriptor.read_bytes())
    data[30] ^= 1
    descriptor.write_bytes(data)
    with pytest.raises(CorruptionError, match="the descriptor of a/pack"):
        store.open("a/pack")
    store.delete(["a/pack"])
    loose = [entry.name for entry in leftovers_of(store, "")]
    assert len(loose) == 1 and loose[0].startswith("a/pack.tmp-")
    store.delete(loose)
    assert not any((mount / "stripes").exists() and files(mount / "stripes") for mount in mounts)


def test_what_reads_like_a_descriptor_is_not_put(store):
    data = Descriptor(1, PART, "0" * 32).encode()
    with pytest.raises(StoreError, match="descriptor"):
        store.put_if_absent("b", Bytes(data), token="t0")
    store.put_if_absent("c", Bytes(b"?" * len(data)), token="t0")
    assert store.get("c", limit=len(data)) == b"?" * len(data)
    assert store.stat("c").length == len(data)


def test_an_object_that_a_dead_process_put_in_some_places_only_is_made_whole(store, mounts):
    """The first place did not have it: there the put had not been decided, or the removal had ended."""
    (mounts[1] / "objects/b").write_bytes(b"of the dead")
    assert "b" not in [entry.name for entry in store.walk("")]
    with pytest.raises(ObjectNotFound):
        store.get("b", limit=99)
    store.put_if_absent("b", Bytes(b"of the living"), token="t1")
    assert {(mount / "objects/b").read_bytes() for mount in mounts} == {b"of the living"}


PROGRAM = """
import os, sys
from tenuto.store.wrappers.stripe import Stripe

class Killed:
    length = 10 * 2**16

    def pieces(self):
        yield memoryview(bytes(2**16))
        yield memoryview(bytes(2**16))
        os._exit(9)

Stripe(*sys.argv[1:], part=2**16).put_if_absent("b/pack", Killed(), token="t1")
"""


def test_a_process_killed_while_it_puts_leaves_no_object(store, mounts):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, mounts)], check=False)
    assert done.returncode == 9
    assert [entry.name for entry in store.walk("")] == ["a/manifest", "a/pack"]
    left = [entry.name for entry in leftovers_of(store, "")]
    assert len(left) == 1 and left[0].startswith("b/pack.tmp-"), left
    store.delete(left)
    assert not list(leftovers_of(store, ""))
    assert all(len(files(mount)) == 4 for mount in mounts), [files(mount) for mount in mounts]


def test_places_are_written_and_read_side_by_side(request):
    """Each place waits within its put, and in each read, until all others are there too."""
    barrier = threading.Barrier(3)

    class Together(DelegatingStore):
        def put_if_absent(self, name, content, *, token):
            if name.startswith("stripes/"):
                barrier.wait(30)
            return super().put_if_absent(name, content, token=token)

    places = [Together(MemoryStore(f"{request.node.nodeid} {number}")) for number in range(3)]
    store = Stripe(*places, part=PART)
    store.put_if_absent("a/pack", Bytes(DATA), token="t0")
    reader = store.open("a/pack")
    for share in reader._shares:
        whole = share.fetch

        def fetch(offset, buffer, whole=whole):
            barrier.wait(30)
            whole(offset, buffer)

        share.fetch = fetch
    buffer = bytearray(3 * PART)
    reader.read_into(0, memoryview(buffer))
    assert buffer == DATA[: 3 * PART]


def test_each_place_is_written_past_the_page_cache(tmp_path, faulty):
    stores = [LocalStore(tmp_path / "one", filesystem=faulty), LocalStore(tmp_path / "two", filesystem=faulty)]
    length = 2 * 3 * 2**20 + 5000
    room = mmap.mmap(-1, length // 4096 * 4096 + 4096)
    room.write(os.urandom(length))
    whole = memoryview(room)[:length]

    class Doubling:
        """Pieces as a save gives them."""

        length = len(whole)

        def pieces(self):
            yield whole[: 2**20]
            yield whole[2**20 : 3 * 2**20]
            yield whole[3 * 2**20 :]

    Stripe(*stores, part=2**18).put_if_absent("a/pack", Doubling(), token="t0")
    assert len(faulty.named("set_direct")) == 2, "turned on once for each place, and never off"
    reader = Stripe(*stores).open("a/pack")
    assert reader.length == length
    buffer = bytearray(length)
    reader.read_into(0, memoryview(buffer))
    assert buffer == whole
    reader.close()


def test_what_it_says_of_itself(store, mounts):
    one = open_store(mounts[0]).capabilities
    assert store.capabilities.parallel == 3 * one.parallel
    assert store.capabilities.commits and store.capabilities.persistent and not store.capabilities.views
    assert store.free_bytes() > 0
    assert store.probe() == store.capabilities


@pytest.mark.parametrize("places", [2, 3, 5])
@pytest.mark.parametrize("length", [1, PART - 1, PART, PART + 1, 7 * PART, 7 * PART + 1])
def test_parts_cover_an_object_once(places, length):
    for file in ("0" * 32, "00000001" + "0" * 24, "f" * 32):
        descriptor = Descriptor(length, PART, file)
        shares = [0] * places
        done = 0
        for number, at, start, size in descriptor.cuts(0, length, places):
            assert (start, at) == (done, shares[number])
            shares[number] += size
            done += size
        assert shares == [descriptor.share_length(number, places) for number in range(places)]
        assert done == length
