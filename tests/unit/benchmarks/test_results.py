"""The figures in RESULTS.md and the README are those of the committed results; and how benchmarks judge."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """table and harness, as the benchmarks themselves import them."""
    sys.path.insert(0, str(HERE))
    try:
        import harness
        import table

        yield table, harness
    finally:
        sys.path.remove(str(HERE))


def test_the_readme_says_what_the_results_say(modules):
    table, _ = modules
    text = table.README.read_text(encoding="utf-8")
    made = table.block(table.load())
    assert table.between(text) == made, "python benchmarks/table.py"
    assert sum(line.startswith("| ") for line in made.splitlines()) == 1 + 6
    assert table.PAGE.read_text(encoding="utf-8") == table.page(table.load()), "python benchmarks/table.py"


def test_every_speed_result_is_in_the_table_and_names_its_command(modules):
    table, _ = modules
    documents = table.load()
    assert documents
    shown = table.page(documents)
    for name, document in documents.items():
        assert document["id"] == name
        assert f"(results/{name}.json)" in shown, "a result that nobody quotes: give it a row"
        script = document["command"].split()[1]
        assert (HERE.parent / script).is_file()
        assert {"state", "machine", "versions", "commit", "made", "threads"} <= document.keys()


def test_the_table_follows_the_results(modules):
    table, _ = modules
    documents = table.load()
    row = next(row for row in table.rows() if row.id in documents)
    name, document = row.id, documents[row.id]
    document["median_s"][row.own] = 1234.5
    document["targets"] = [
        {"target": "a limit", "ratio": 3.0, "interval": [2.5, 3.5], "met": False, "limit": 1.0},
        {"target": "another", "ratio": 0.5, "interval": [0.4, 0.6], "met": True, "limit": 1.0},
    ]
    made = table.page({name: document})
    assert "**1234.50 s**" in made
    assert "a limit: 3.00 (2.50 to 3.50)" in made
    assert "another" not in made
    assert made.count("\n| ") == 1 + sum(row.id == name for row in table.rows())


@pytest.mark.parametrize("size", ["_0.1gib", "_1gib", "_4gib"])
@pytest.mark.parametrize(
    ("id", "own", "figures"),
    [
        ("p1_stall", "tenuto save()", "median_s"),
        ("p2_fenced", "tenuto save(), fenced", "median_s"),
        ("p3_overhead", "lost to a tenuto save(), fenced", "median_s"),
        ("p3_everyday", "tenuto, memory and disk", "share_lost"),
        ("p8_memory", "tenuto.Checkpointer, memory tier: held", "median_bytes"),
        ("p9_restart", "restore() from memory, one thread", "median_s"),
        ("ranks_stall_2", "tenuto save()", "median_s"),
        ("ranks_fenced_2", "tenuto save(), fenced", "median_s"),
        ("ranks_compute_4", "lost to a tenuto save()", "median_s"),
        ("ranks_durable_4", "tenuto save(wait=True)", "median_s"),
        ("ranks_restore_hot_4", "tenuto restore()", "median_s"),
        ("ranks_restore_cold_2", "tenuto restore()", "median_s"),
    ],
)
def test_every_size_of_what_is_measured_at_several_has_a_row(modules, id, own, figures, size):
    table, _ = modules
    document = dict(next(iter(table.load().values())), id=id + size, targets=[], state={"gib": 0.141, "leaves": 12})
    document |= {"median_s": {}, "median_bytes": {}, figures: {own: 0.0213}}
    made = table.page({id + size: document})
    (line,) = (line for line in made.splitlines() if f"results/{id}{size}.json" in line)
    assert ", 0.14 GiB |" in line
    shown = {"median_s": "**21.3 ms**", "share_lost": "**2.1 %**", "median_bytes": "**0 MiB**"}
    assert shown[figures] in line


def test_what_was_not_measured_beside_has_no_row(modules):
    table, _ = modules
    document = dict(next(iter(table.load().values())), id="p3_overhead_1gib", targets=[])
    document["median_s"] = {"lost to a tenuto save()": 1.0}
    made = table.page({"p3_overhead_1gib": document})
    assert made.count("results/p3_overhead_1gib.json") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0000123, "12.3 us"),
        (0.168, "168 ms"),
        (0.00512, "5.12 ms"),
        (0.9994, "999 ms"),
        (2.0224, "2.02 s"),
        (-0.01, "-10.0 ms"),
    ],
)
def test_figures_have_three_digits(modules, value, text):
    assert modules[0].seconds(value) == text


def test_marks_that_are_gone_are_an_error(modules):
    table, _ = modules
    with pytest.raises(ValueError, match="lacks the two lines"):
        table.between("no marks")
    with pytest.raises(ValueError, match="lacks the two lines"):
        table.between(f"{table.END}\n{table.BEGIN}")


def test_a_target_is_met_when_the_intervals_bad_end_meets_it(modules):
    _, harness = modules
    result = harness.Result("x", {"a": [2.0, 2.0, 2.0, 9.0, 2.0], "b": [1.0] * 5}, 1)
    result.judge(harness.Target("close", "a", "b", at_most=2.0))
    result.judge(harness.Target("wide", "a", "b", at_most=9.0))
    result.judge(harness.Target("least", "a", "b", at_least=2.0))
    result.judge(harness.Target("more", "a", "b", at_least=2.1))
    assert [target["met"] for target in result.targets] == [False, True, True, False]
    assert result.targets[0]["ratio"] == 2.0
    assert result.targets[0]["interval"][1] > 2.0


def test_the_allowance_comes_off_the_numerator_and_medians_are_resampled_together(modules):
    _, harness = modules
    result = harness.Result("x", {"a": [3.0, 5.0, 7.0], "b": [1.0, 2.0, 3.0]}, 1)
    assert result.ratio("a", "b", 1.0) == (2.0, 2.0, 2.0)
    assert result.ratio("a", "b", 1.0, of_medians=True) == (2.0, 2.0, 2.0)
    assert harness.median_interval([4.0, 4.0, 4.0]) == (4.0, 4.0, 4.0)


def test_rounds_interleave_in_turning_order_and_the_first_is_not_counted(modules):
    _, harness = modules
    order = []

    def measured(name):
        return lambda: order.append(name) or float(len(order))

    contenders = [harness.Contender(name, measured(name)) for name in "abc"]
    seconds = harness.compare(contenders, rounds=2, own="a", note=lambda text: None)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert seconds == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("p[0-9]*.py")))
def test_every_benchmark_is_explained_and_run_by_make(name):
    assert f"benchmarks/{name}.py" in (HERE.parent / "Makefile").read_text(encoding="utf-8")
    assert f"{name}.py" in (HERE / "README.md").read_text(encoding="utf-8")
    assert importlib.util.spec_from_file_location(name, HERE / f"{name}.py") is not None
