"""Programs that are forked for the tests are as independent of each other as started ones."""

from concurrent.futures import ThreadPoolExecutor

from support import loaded_interpreter

DRAW = "import numpy, random, secrets; print(numpy.random.rand(), random.random(), secrets.token_hex(4))"


def test_no_two_programs_draw_the_same_numbers_unseeded():
    drawn = [loaded_interpreter.run(["-c", DRAW]).stdout.split() for _ in range(2)]
    assert all(len({*both}) == 2 for both in zip(*drawn, strict=True))


def test_programs_that_several_threads_start_are_not_mixed_up():
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda number: loaded_interpreter.run(["-c", f"raise SystemExit({number})"]), range(24)))
    assert [one.returncode for one in ended] == list(range(24))
