import os
import signal
import sys
import textwrap
import threading
import types
import warnings

import pytest

from support.loaded_interpreter import Program
from tenuto.training import preemption
from tenuto.training.preemption import Preempted, SignalWatch, in_notebook, leaving_signals

TERM, HUP, USR1, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT


@pytest.fixture(autouse=True)
def handlers_as_before():
    """Every test starts from the defaults and leaves the handlers of the test run as they were."""
    assert threading.current_thread() is threading.main_thread(), "signals need the main thread"
    before = {number: signal.getsignal(number) for number in (TERM, HUP, USR1, INT)}
    signal.signal(TERM, signal.SIG_DFL)
    signal.signal(HUP, signal.SIG_DFL)
    signal.signal(USR1, signal.SIG_DFL)
    signal.signal(INT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not preemption._installed


def now():
    return [signal.getsignal(number) for number in (TERM, HUP, USR1, INT)]


DEFAULTS = [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]


@pytest.mark.parametrize("number", [TERM, HUP, USR1, INT])
def test_it_notes_which_signal_came_first_and_training_goes_on(number):
    with SignalWatch() as watch:
        assert (watch.received, watch.name) == (None, None)
        signal.raise_signal(number)
        signal.raise_signal(USR1)
        assert (watch.received, watch.name) == (number, signal.Signals(number).name)
    assert now() == DEFAULTS


def test_a_second_interrupt_interrupts_at_once():
    with SignalWatch() as watch:
        signal.raise_signal(INT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INT)
        assert watch.name == "SIGINT"


def test_earlier_handlers_are_called_and_put_back():
    heard = []

    def mine(number, frame):
        heard.append((number, frame is not None))

    signal.signal(TERM, mine)
    with SignalWatch() as watch:
        signal.raise_signal(TERM)
    assert (heard, watch.name) == ([(TERM, True)], "SIGTERM")
    assert signal.getsignal(TERM) is mine


def test_an_earlier_handler_that_leaves_waits_for_the_save():
    def leave(number, frame):
        sys.exit(3)

    signal.signal(TERM, leave)
    with SignalWatch() as watch:
        signal.raise_signal(TERM)
        assert watch.name == "SIGTERM"
        assert isinstance(watch.deferred, SystemExit)
        assert watch.deferred.code == 3


def test_an_earlier_handler_that_fails_is_heard():
    signal.signal(TERM, lambda number, frame: 1 / 0)
    with SignalWatch() as watch:
        with pytest.raises(ZeroDivisionError):
            signal.raise_signal(TERM)
        assert watch.name == "SIGTERM"


def test_install_and_restore_are_idempotent_and_repeatable():
    watch = SignalWatch()
    for _ in range(2):
        watch.install().install()
        assert watch.installed
        watch.restore()
        watch.restore()
        assert not watch.installed
        assert now() == DEFAULTS


def test_restore_leaves_alone_what_was_put_on_top_and_passes_on():
    heard = []

    def mine(number, frame):
        heard.append(number)

    signal.signal(TERM, mine)
    watch = SignalWatch().install()
    below = signal.getsignal(TERM)

    def later(number, frame):
        heard.append("later")
        below(number, frame)

    signal.signal(TERM, later)
    watch.restore()
    assert signal.getsignal(TERM) is later
    signal.raise_signal(TERM)
    assert (heard, watch.received) == (["later", TERM], None)
    watch.install()
    signal.signal(TERM, below)
    signal.raise_signal(TERM)
    assert watch.name == "SIGTERM"
    watch.restore()
    assert signal.getsignal(TERM) is mine


@pytest.mark.parametrize("first_out", ["inner", "outer"])
def test_watches_nest_and_come_out_in_any_order(first_out):
    outer, inner = SignalWatch().install(), SignalWatch().install()
    signal.raise_signal(USR1)
    assert (outer.name, inner.name) == ("SIGUSR1", "SIGUSR1")
    first, second = (inner, outer) if first_out == "inner" else (outer, inner)
    first.restore()
    signal.raise_signal(TERM)
    assert (first.received, second.received) == (USR1, USR1)
    second.restore()
    assert now() == DEFAULTS
    assert (outer._earlier, inner._earlier) == ({}, {})


def test_the_second_interrupt_of_an_outer_watch_is_not_held_back_by_an_inner_one():
    with SignalWatch():
        signal.raise_signal(INT)
        with SignalWatch() as inner:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(INT)
            assert inner.deferred is None


@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize("leaving", [Preempted(TERM), KeyboardInterrupt()], ids=["preempted", "interrupt"])
def test_a_watch_below_that_leaves_waits_for_the_one_above(number, leaving):
    def leave():
        raise leaving

    told = []
    with SignalWatch() as outer, SignalWatch() as inner:
        outer.notify = leave
        inner.notify = lambda: told.append(inner.deferred)
        try:
            signal.raise_signal(number)
        except (SystemExit, KeyboardInterrupt) as error:
            pytest.fail(f"{error!r} has left the handler")
        assert told == [leaving] and outer.name == inner.name


def test_off_the_main_thread_nothing_is_installed_and_it_says_so():
    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch = SignalWatch().install()
            found.append((watch.installed, [str(warning.message)[:24] for warning in caught]))
            watch.restore()

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, ["signals are not watched:"])]
    assert now() == DEFAULTS


def test_restored_off_the_main_thread_it_only_passes_on():
    heard = []
    signal.signal(TERM, lambda number, frame: heard.append(number))
    watch = SignalWatch().install()
    thread = threading.Thread(target=watch.restore)
    thread.start()
    thread.join()
    signal.raise_signal(TERM)
    assert (heard, watch.received) == ([TERM], None)
    watch.restore()
    assert watch._earlier == {}


@pytest.mark.parametrize("number", [TERM, HUP, USR1, INT])
def test_what_nohup_or_a_background_job_of_a_shell_ignores_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with SignalWatch() as watch:
        signal.raise_signal(number)
        assert watch.received is None
        assert signal.getsignal(number) == signal.SIG_IGN


def test_a_notebook_keeps_its_interrupts(monkeypatch):
    assert INT in leaving_signals()
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook()
    with SignalWatch():
        assert signal.getsignal(INT) is signal.default_int_handler
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()


def script(body):
    """Starts a process that says when it is ready; signals are sent only then."""
    head = "import os, signal, sys\nfrom tenuto.training.preemption import SignalWatch\n"
    head += "from tenuto.training.preemption import Preempted\n"
    head += "def ready(): print('ready', flush=True)\n"
    return Program(["-c", head + textwrap.dedent(body)])


LOOP = """
with SignalWatch() as watch:
    ready()
    sys.stdin.readline()
    print("finished the step and saved", flush=True)
raise Preempted(watch.received)
"""


@pytest.mark.parametrize("number", [TERM, HUP, USR1, INT])
def test_a_process_finishes_its_step_and_leaves_with_128_plus_n(number):
    process = script(LOOP)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate("go on\n", timeout=60)
    assert (out, err, process.returncode) == ("finished the step and saved\n", "", 128 + number)


def test_after_restore_the_default_acts_again():
    process = script("""
        outer, inner = SignalWatch().install(), SignalWatch().install()
        outer.restore()
        inner.restore()
        ready()
        sys.stdin.readline()
    """)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(TERM)
    process.communicate(timeout=60)
    assert process.returncode == -TERM


def test_a_restored_watch_that_could_not_be_taken_out_lets_the_default_act():
    process = script("""
        import threading
        watch = SignalWatch().install()
        thread = threading.Thread(target=watch.restore)
        thread.start()
        thread.join()
        ready()
        sys.stdin.readline()
    """)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(TERM)
    process.communicate(timeout=60)
    assert process.returncode == -TERM


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_ended_by_the_signal_as_ever():
    """A loader worker is told to end by SIGTERM; a handler of its parent's would keep it alive."""
    process = script("""
        watch = SignalWatch().install()
        child = os.fork()
        if child == 0:
            ready()
            while True:
                signal.pause()
        sys.stdin.readline()
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), watch.received)
    """)
    assert process.stdout.readline() == "ready\n"
    out, err = process.communicate("go on\n", timeout=60)
    assert (out, err) == (f"{-TERM} None\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_off_the_main_thread_is_ended_too():
    process = script("""
        import threading
        watch = SignalWatch().install()
        def fork():
            child = os.fork()
            if child == 0:
                ready()
                while True:
                    signal.pause()
            found.append(child)
        found = []
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        sys.stdin.readline()
        os.kill(found[0], signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(found[0], 0)[1]), watch.received)
    """)
    assert process.stdout.readline() == "ready\n"
    out, _ = process.communicate("go on\n", timeout=60)
    assert out == f"{-TERM} None\n"


def test_a_signal_while_a_watch_is_restored_reaches_the_handler_beneath(monkeypatch):
    heard = []
    signal.signal(USR1, lambda number, frame: heard.append(number))
    watch = SignalWatch().install()
    put = signal.signal

    def after_a_signal(number, handler):
        if number == USR1:
            signal.raise_signal(USR1)
        return put(number, handler)

    monkeypatch.setattr(signal, "signal", after_a_signal)
    watch.restore()
    monkeypatch.undo()
    assert heard == [USR1]
    assert not watch._earlier
