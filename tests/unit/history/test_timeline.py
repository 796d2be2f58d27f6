"""The history of a run: what each checkpoint continues, what was left behind, who went back, and how it is drawn."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.cli.views.history_graph import Graph, sparkline
from tenuto.errors import CheckpointNotFound, RunNotFound
from tenuto.history.timeline import Point, timeline
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import line_of, same_step, walk
from tenuto.store.contract import Bytes


def at(attempt, step, run="main"):
    return CheckpointId(run, attempt, step)


def drawn(points, latest):
    graph = Graph(points, latest)
    return [row for point in points for row in graph.point(point)]


def went_back(repository, train):
    train([1, 2, 3])
    repository.rollback(2, reason="diverged")
    train([3, 4])


def test_points_say_what_they_continue_and_what_was_left_behind(repository, train):
    went_back(repository, train)
    found = repository.log()
    assert [(str(point.id)[5:], point.on_line, point.latest) for point in found.points] == [
        ("a0003/4", True, True),
        ("a0003/3", True, False),
        ("a0001/3", False, False),
        ("a0001/2", True, False),
        ("a0001/1", True, False),
    ]
    assert [point.after for point in found.points] == [at(3, 3), at(1, 2), at(1, 2), at(1, 1), None]
    (turn,) = found.turns
    assert (turn.kind, turn.attempt, turn.to, turn.reason) == ("rollback", 2, at(1, 2), "diverged")
    assert [id.step for id, _ in found.series("loss")] == [1, 2, 3, 4]
    assert found.rows()[0]["metrics.loss"] == 0.25
    assert drawn(found.points, found.latest) == ["*", "*", "| o", "|/", "*", "*"]


def test_where_a_checkpoint_was_removed_the_one_before_it_is_continued(repository, train):
    from tenuto.maintenance import remove

    went_back(repository, train)
    remove.execute(repository.repo, remove.plan_remove(repository.repo, [at(1, 2), at(3, 3)]))
    after = {point.id: point.after for point in repository.log().points}
    assert after == {at(3, 4): at(1, 1), at(1, 3): at(1, 1), at(1, 1): None}


def test_a_limit_reads_no_more_and_says_so(repository, train):
    went_back(repository, train)
    found = repository.log(limit=2)
    assert ([point.id for point in found.points], found.more) == ([at(3, 4), at(3, 3)], True)
    assert found.points[1].after == at(1, 2)
    assert not repository.log(limit=5).more


def test_a_fork_shows_the_line_that_it_came_from_and_is_named_there(repository, train):
    train([1, 2, 3])
    repository.fork(2, "warm", reason="a lower rate")
    assert repository.log("warm").latest == at(1, 2)
    train([3], "warm")
    found = repository.log("warm")
    assert [point.id for point in found.points] == [at(2, 3, "warm"), at(1, 2), at(1, 1)]
    assert [point.after for point in found.points] == [at(1, 2), at(1, 1), None]
    assert all(point.on_line for point in found.points)
    assert [(turn.kind, turn.to, turn.reason) for turn in found.turns] == [("fork", at(1, 2), "a lower rate")]
    assert {point.id: point.forks for point in repository.log().points}[at(1, 2)] == ("warm",)
    assert drawn(found.points, found.latest) == ["*", "*", "*"]


def test_a_run_without_checkpoints_says_what_there_is(repository):
    with pytest.raises(RunNotFound, match="unused"):
        repository.log("mian")
    repository.repo.store.delete([repository.latest("unused").manifest])
    with pytest.raises(CheckpointNotFound):
        repository.log("unused")


def test_tags_pins_notes_and_damage_are_shown(repository, train):
    train([1, 2])
    repository.tag("paper", 1)
    repository.pin(1, reason="figure 3")
    repository.note(1, "looked fine")
    repository.add_metrics(1, {"val_loss": 2.0, "loss": 0.5})
    repository.repo.store.delete([at(1, 2).manifest])
    repository.repo.store.put_if_absent(at(1, 2).manifest, Bytes(b"?"), token="t")
    newest, oldest = repository.log().points
    assert (newest.damaged, newest.latest, newest.bytes) == (True, True, None)
    assert (oldest.tags, oldest.texts) == (("paper",), ("looked fine",))
    assert [(ref.kind, ref.reason) for ref in oldest.refs] == [("pin", "figure 3"), ("tag", "")]
    assert oldest.metrics == {"loss": 0.5, "val_loss": 2.0}
    assert drawn((newest, oldest), newest.id) == ["x", "*"]


def test_one_step_of_two_attempts_is_two_checkpoints(repository, train):
    went_back(repository, train)
    assert repository.find(step=3) == at(3, 3), "the one on the line"
    assert same_step(repository.repo, at(3, 3)) == [at(1, 3)]
    assert same_step(repository.repo, at(1, 2)) == []
    assert list(line_of(repository.repo, "main", at(1, 3))) == [at(1, 3), at(1, 2), at(1, 1)]
    assert list(line_of(repository.repo, "main", at(3, 4))) == list(walk(repository.repo, "main"))


histories = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(histories)
def test_whatever_was_rolled_back_every_line_is_drawn_from_its_end_to_where_it_began(history):
    """Each attempt saves some steps from a checkpoint chosen among all before it."""
    points, number = [], itertools.count(1)
    for saves, choice in history:
        parent = points[choice % len(points)][0] if points else None
        attempt = next(number)
        for step in range((parent.step if parent else 0) + 1, (parent.step if parent else 0) + 1 + saves):
            points.append((at(attempt, step), parent))
            parent = at(attempt, step)
    if not points:
        return
    latest = points[-1][0]
    before, line, cursor = dict(points), set(), latest
    while cursor is not None:
        line.add(cursor)
        cursor = before[cursor]
    shown = tuple(Point(id, before[id], id in line) for id in sorted(before, reverse=True))
    graph = Graph(shown, latest)
    rows = [graph.point(point) for point in shown]
    assert all("".join(row).count("*") + "".join(row).count("o") == 1 for row in rows)
    assert all(row[-1].startswith("*") for row, point in zip(rows, shown, strict=True) if point.on_line)
    assert not any(row[-1].startswith("o") for row in rows), "the first column is the line's"
    assert graph.between() == "", "every line has ended"
    joined = sum(line.count("/") for row in rows for line in row[:-1])
    branches = sum(max(list(before.values()).count(id) - 1, 0) for id in before)
    assert joined == branches


def test_a_course_is_a_line_of_bars_whatever_the_values():
    assert sparkline([1, 2, 3]) == "▁▅█"
    assert sparkline([2, 2]) == "▅▅"
    assert sparkline([1, math.nan, math.inf, 2]) == "▁!!█"
    assert sparkline([-1e308, 1e308]) == "▁█"
    assert len(sparkline(range(1000))) == 40 and sparkline([]) == ""


def test_a_damaged_attempt_record_hides_no_history(repository, train):
    went_back(repository, train)
    name = "runs/main/a0002/attempt.json"
    repository.repo.store.delete([name])
    repository.repo.store.put_if_absent(name, Bytes(b"?"), token="t")
    found = timeline(repository.repo, "main")
    assert (len(found.points), found.turns) == (5, ())


def test_the_checkpoints_of_one_run_and_of_all_in_their_order(repository, train):
    train([1, 2])
    train([3])
    train([1], "other")
    of_main = [at(1, 1), at(1, 2), at(2, 3)]
    assert repository.repo.checkpoints("Main") == of_main
    assert repository.repo.checkpoints() == [*of_main, at(1, 1, "other"), at(1, 0, "unused")]
    assert repository.checkpoints() == of_main[::-1]
