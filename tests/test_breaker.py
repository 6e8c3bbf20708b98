"""The circuit breaker on a clock of its own."""

import threading

import pytest

from longtake.state_cache import StoreUnavailable
from longtake.state_cache.breaker import PAUSE_SECONDS, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def admitted_elsewhere(breaker: Breaker) -> bool:
    """Whether a call of another thread would go through; it stays in."""
    refused: list[StoreUnavailable] = []

    def call() -> None:
        try:
            breaker.admit()
        except StoreUnavailable as error:
            refused.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return not refused


def test_it_opens_for_a_while_and_then_lets_one_call_try() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.admit()
    breaker.failed()
    breaker.leave()
    clock.now += PAUSE_SECONDS * 0.9
    with pytest.raises(StoreUnavailable):
        breaker.admit()
    clock.now += PAUSE_SECONDS * 0.2
    breaker.admit()
    breaker.admit()
    assert not admitted_elsewhere(breaker)


def test_a_try_that_fails_opens_it_again_and_one_that_succeeds_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed()
    clock.now += PAUSE_SECONDS
    breaker.admit()
    breaker.failed()
    breaker.leave()
    assert not admitted_elsewhere(breaker)
    clock.now += PAUSE_SECONDS
    breaker.admit()
    breaker.answered()
    breaker.leave()
    assert admitted_elsewhere(breaker)
    assert admitted_elsewhere(breaker)


def test_a_try_that_ends_without_an_answer_leaves_the_next_one_to_try() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed()
    clock.now += PAUSE_SECONDS
    breaker.admit()
    breaker.leave()
    assert admitted_elsewhere(breaker)
    with pytest.raises(StoreUnavailable):
        breaker.admit()
