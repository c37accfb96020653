from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.unit.router.test_directory import Clock, state
from vllm_pd.router.directory import Directory
from vllm_pd.router.index_watch import IndexWatch
from vllm_pd.router.readiness import GRACE_S, STORE_GRACE_S, Readiness
from vllm_pd.router.worker import Source


@dataclass
class Mirror:
    loaded: bool = False
    problem: str = ""


@dataclass
class Watch:
    mirrors: list[Mirror]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def readiness(clock: Clock, *mirrors: Mirror) -> Readiness:
    directory = Directory(clock, store_configured=True)
    directory.replace(Source.STORE, [state("a")])
    return Readiness(directory, cast(IndexWatch, Watch(list(mirrors))), lambda: False, clock)


def test_every_pool_that_is_there_at_the_start_is_waited_for(clock: Clock) -> None:
    one, two = Mirror(loaded=True), Mirror()
    ready = readiness(clock, one, two)
    assert "index is being loaded" in ready.missing()
    two.loaded = True
    assert ready.missing() == ""


def test_pool_that_joins_later_takes_nobody_out_of_service(clock: Clock) -> None:
    mirrors = [Mirror(loaded=True)]
    ready = readiness(clock, *mirrors)
    assert ready.missing() == ""
    cast(Any, mirrors).append(Mirror())
    assert ready.missing() == ""


@pytest.mark.parametrize(
    ("problem", "grace"), [("", GRACE_S), ("The store redis://h does not answer; start it.", STORE_GRACE_S)]
)
def test_after_some_time_serving_by_load_beats_not_serving(
    clock: Clock, caplog: pytest.LogCaptureFixture, problem: str, grace: float
) -> None:
    ready = readiness(clock, Mirror(problem=problem))
    assert problem.rstrip(".") in ready.missing()
    clock.now += grace - 0.1
    assert ready.missing()
    clock.now += 0.1
    assert ready.missing() == ""
    assert "ready without the block index" in caplog.text
    assert ready.missing() == ""


@pytest.mark.parametrize("up", [True, False])
def test_pool_of_the_store_that_joins_static_workers_takes_nobody_out_of_service(clock: Clock, up: bool) -> None:
    directory = Directory(clock, store_configured=True)
    directory.replace(Source.STATIC, [state("a")])
    mirrors: list[Mirror] = []
    ready = Readiness(directory, cast(IndexWatch, Watch(mirrors)), lambda: False, clock)
    if up:
        directory.store_up()
    else:
        directory.store_down("The store redis://h does not answer; start it.")
    assert ready.missing() == ""
    mirrors.append(Mirror())
    assert ready.missing() == ""


def test_without_an_index_nothing_is_waited_for(clock: Clock) -> None:
    assert readiness(clock).missing() == ""
