import pickle
import signal

import pytest

from tenuto.training.preemption import Preempted


def test_it_is_the_exit_that_schedulers_know():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        with pytest.raises(SystemExit) as caught:
            raise Preempted(number)
        assert caught.value.code == 128 + number
        assert caught.value.signal_name == signal.Signals(number).name


def test_it_survives_a_trip_to_another_process():
    back = pickle.loads(pickle.dumps(Preempted(15)))  # noqa: S301 - what multiprocessing does with it
    assert (back.signum, back.code, repr(back)) == (15, 143, "Preempted(SIGTERM)")


def test_it_is_no_exception_that_a_training_loop_catches_by_accident():
    assert not issubclass(Preempted, Exception)


def test_a_signal_without_a_name():
    assert Preempted(99).signal_name == "signal 99"
