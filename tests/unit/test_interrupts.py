"""Ctrl-C is obeyed where it is allowed, and remembered where it is not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from vllm_pd.interrupts import Interrupted, Interrupts


def test_a_signal_is_remembered_until_the_next_check() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 1
        with pytest.raises(Interrupted):
            interrupts.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_wait_where_that_is_allowed(number: signal.Signals) -> None:
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.anywhere():
        os.kill(os.getpid(), number)
        time.sleep(60)


def test_an_earlier_signal_stops_the_next_interruptible_part_before_it_begins() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted), interrupts.anywhere():
            pytest.fail("entered")


def test_handlers_are_restored_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
