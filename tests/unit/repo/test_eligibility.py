"""Which sealed image a run may go on from: every way in which something else has been gone on from since."""

import os
from dataclasses import replace

import pytest

from tenuto.engine.memory_tier.eligibility import EligibleImage, judge
from tenuto.engine.memory_tier.seal import KIND, SealedObject, SealHolder, decode_seal, encode_seal, new_seal, newest
from tenuto.engine.staging.slots import MAX_PAYLOAD
from tenuto.errors import CorruptionError, FormatTooNew
from tenuto.maintenance import remove
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import objects
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

NAME = "ab/gpt/0-1"


def attempt_with(make, steps, parent=None):
    """The run's next attempt, which has committed these steps."""
    attempt = make.attempt(len(make.repo.attempts("gpt")) + 1, parent)
    for step in steps:
        make.checkpoint(attempt.number, step)
    return attempt


def sealed(repo, attempt, step, *, id=None, save_id="ef" * 16):
    return new_seal(
        repo,
        id or CheckpointId("gpt", attempt.number, step),
        save_id,
        SealHolder(attempt.number, attempt.id),
        rank=0,
        sequence=3,
        image=4096,
        index=SealedObject(100, b"i" * 16),
        manifest=SealedObject(200, b"m" * 16),
        saved_s=12.5,
        content=[],
    )


def at(attempt, step):
    return CheckpointId("gpt", attempt, step)


def rm(repo, id):
    """As `tenuto rm --force` does where the run's process is known to be gone."""
    finished = {"gpt": max(repo.attempts("gpt"))}
    remove.execute(repo, remove.plan_remove(repo, [id], force=True, finished=finished))


def test_the_newest_of_the_last_attempt(repo, make):
    first = attempt_with(make, [10, 20])
    assert judge(repo, "gpt", sealed(repo, first, 25)) == EligibleImage(at(1, 20), durable=False)
    assert "durable" in judge(repo, "gpt", sealed(repo, first, 20)), "another save's step 20"
    assert "durable" in judge(repo, "gpt", sealed(repo, first, 15))


def test_an_attempt_that_never_committed(repo, make):
    first = attempt_with(make, [])
    assert judge(repo, "gpt", sealed(repo, first, 5)) == EligibleImage(None, durable=False)
    later = attempt_with(make, [])
    assert judge(repo, "gpt", sealed(repo, first, 5)) == EligibleImage(None, durable=False)
    assert judge(repo, "gpt", sealed(repo, later, 2)) == EligibleImage(None, durable=False)


def test_the_checkpoint_itself_is_only_quicker_to_read(repo, make):
    attempt = attempt_with(make, [10])
    save_id = make.written[at(1, 10)].save_id
    assert judge(repo, "gpt", sealed(repo, attempt, 10, save_id=save_id)) == EligibleImage(at(1, 10), True)
    second = attempt_with(make, [], at(1, 10))
    footer = sealed(repo, second, 10, id=at(1, 10), save_id=save_id)
    assert judge(repo, "gpt", footer) == EligibleImage(at(1, 10), True)


def test_attempts_without_a_commit_are_passed_through(repo, make):
    first = attempt_with(make, [10])
    second = attempt_with(make, [], at(1, 10))
    attempt_with(make, [], at(1, 10))
    for holder in (first, second):
        assert judge(repo, "gpt", sealed(repo, holder, 12)) == EligibleImage(at(1, 10), durable=False)


def test_one_with_a_commit_has_gone_further(repo, make):
    first = attempt_with(make, [10])
    attempt_with(make, [11], at(1, 10))
    attempt_with(make, [], at(2, 11))
    assert "attempt 2 has gone further" in judge(repo, "gpt", sealed(repo, first, 50))


def test_going_back_on_purpose_rules_out_what_was_gone_back_behind(repo, make):
    first = attempt_with(make, [10, 20])
    attempt_with(make, [], at(1, 10))
    assert "resumed from gpt/a0001/10" in judge(repo, "gpt", sealed(repo, first, 25))
    third = attempt_with(make, [], at(1, 20))
    assert "resumed from gpt/a0001/10" not in str(judge(repo, "gpt", sealed(repo, third, 25)))


def test_what_it_went_on_from_must_still_be_there(repo, make):
    attempt_with(make, [10])
    second = attempt_with(make, [], at(1, 10))
    assert judge(repo, "gpt", sealed(repo, second, 11)) == EligibleImage(at(1, 10), durable=False)
    assert "no newer" in judge(repo, "gpt", sealed(repo, second, 10))
    repo.store.delete([at(1, 10).manifest])
    assert "has been removed" in judge(repo, "gpt", sealed(repo, second, 11))


def test_nothing_goes_on_from_memory_behind_a_checkpoint_that_was_removed_by_hand(repo, make):
    first = attempt_with(make, [10, 20])
    itself = sealed(repo, first, 20, save_id=make.written[at(1, 20)].save_id)
    assert judge(repo, "gpt", itself) == EligibleImage(at(1, 20), durable=True)
    rm(repo, at(1, 20))
    for footer in (itself, sealed(repo, first, 25)):
        assert judge(repo, "gpt", footer) == "step 20 of attempt 1, at or before it, was removed by hand"
    assert judge(repo, "gpt", sealed(repo, first, 15)) == EligibleImage(at(1, 10), durable=False)
    second = attempt_with(make, [], at(1, 10))
    assert judge(repo, "gpt", sealed(repo, second, 25)) == EligibleImage(at(1, 10), durable=False), "trained anew"


def test_one_whose_attempt_has_no_other_checkpoint_is_ruled_out_too(repo, make):
    first = attempt_with(make, [10])
    rm(repo, at(1, 10))
    assert "step 10 of attempt 1" in str(judge(repo, "gpt", sealed(repo, first, 25)))
    assert judge(repo, "gpt", sealed(repo, first, 5)) == EligibleImage(None, durable=False)


def test_foreign_ones(repo, make, tmp_path, monkeypatch):
    first = attempt_with(make, [10])
    footer = sealed(repo, first, 12)
    other = Repo.create_or_open(open_store(tmp_path / "other"))
    assert judge(other, "gpt", footer) == "it is of another repository"
    assert judge(repo, "side", footer) == "it is of run gpt"
    assert "before this machine was started" in judge(repo, "gpt", replace(footer, boot="b"))
    assert "before this machine was started" in judge(repo, "gpt", replace(footer, boot=""))
    assert judge(repo, "gpt", replace(footer, uid=os.geteuid() + 1)) == f"user {os.geteuid() + 1} sealed it"
    stranger = replace(footer, holder=SealHolder(1, "00" * 16))
    assert "no longer the one that sealed it" in judge(repo, "gpt", stranger)
    assert "no longer the one that sealed it" in judge(repo, "gpt", replace(footer, holder=SealHolder(9, first.id)))


def test_damage_of_what_tells_is_no_reason_to_go_on(repo, make):
    first = attempt_with(make, [10])
    attempt_with(make, [], at(1, 10))
    make.damage("runs/gpt/a0002/attempt.json")
    assert "cannot be read" in judge(repo, "gpt", sealed(repo, first, 12))


def test_a_footer_is_read_as_it_was_written_and_under_its_own_name_alone(repo, make):
    first = attempt_with(make, [])
    footer = sealed(repo, first, 12)
    data = encode_seal(footer, NAME)
    assert len(data) <= MAX_PAYLOAD
    assert decode_seal(data, NAME) == footer
    with pytest.raises(CorruptionError, match="copy"):
        decode_seal(data, "ab/gpt/0-0")
    again = footer.held_by(SealHolder(2, "11" * 16), None)
    assert (again.sequence, again.id) == (4, footer.id)
    assert newest([(0, data), (1, encode_seal(again, NAME))], NAME) == (1, again)
    assert newest([(0, data), (1, data[:-1])], NAME) == (0, footer)
    assert newest([(0, data)], "ab/gpt/0-0") is None


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": None},
        {"sequence": 0},
        {"image": -1},
        {"image": "4096"},
        {"holder": {"attempt": 0, "claim": "00" * 16}},
        {"holder": {"attempt": 1, "claim": "x"}},
        {"index": {"digest": "00" * 16}},
        {"manifest": {"digest": "00", "length": 3}},
        {"save_id": "short"},
        {"uid": None},
    ],
)
def test_a_footer_that_lies_is_refused(repo, make, change):
    first = attempt_with(make, [])
    body = canonical_json.loads(encode_seal(sealed(repo, first, 12), NAME))
    for key in ("digest", "format", "kind", "path"):
        del body[key]
    with pytest.raises(CorruptionError):
        decode_seal(objects.encode(KIND, NAME, {**body, **change}, None), NAME)


def test_a_newer_format_is_none_of_ours(repo, make):
    first = attempt_with(make, [])
    body = canonical_json.loads(encode_seal(sealed(repo, first, 12), NAME))
    del body["digest"]
    data = canonical_json.seal({**body, "format": 2})
    with pytest.raises(FormatTooNew):
        decode_seal(data, NAME)
    assert newest([(0, data)], NAME) is None


def test_one_of_several_ranks_says_of_how_many_and_one_process_says_nothing(repo, make):
    alone = sealed(repo, attempt_with(make, []), 5)
    assert b'"ranks"' not in encode_seal(alone, NAME)
    assert decode_seal(encode_seal(alone, NAME), NAME).ranks == 1
    second = replace(alone, rank=1, ranks=2)
    assert decode_seal(encode_seal(second, NAME), NAME) == second


@pytest.mark.parametrize(("rank", "ranks"), [(1, 1), (2, 2), (7, 3)])
def test_a_rank_beyond_their_number_seals_nothing(repo, make, rank, ranks):
    footer = replace(sealed(repo, attempt_with(make, []), 5), rank=rank, ranks=ranks)
    with pytest.raises(CorruptionError, match="rank"):
        decode_seal(encode_seal(footer, NAME), NAME)


def test_a_rollback_rules_out_what_is_newer_also_where_it_goes_back_to_where_the_image_began(repo, make):
    first = attempt_with(make, [10])
    make.attempt(2, at(1, 10), by="rollback")
    assert judge(repo, "gpt", sealed(repo, first, 12)) == "the run was rolled back to gpt/a0001/10"
    third = attempt_with(make, [], at(1, 10))
    assert judge(repo, "gpt", sealed(repo, third, 12)) == EligibleImage(at(1, 10), durable=False), "trained again"
