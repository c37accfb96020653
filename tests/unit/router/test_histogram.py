from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Usual

from vllm_pd.router.histogram import Histogram

BOUNDS = (0.001, 0.25, 1.0, 10.0)


def page(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.001, 0.1, 0.25, 0.3, 1.0, 9.0, 11.0]))))
def test_page_is_that_of_the_usual_histogram(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("x_seconds", "Some text.", BOUNDS, ours, ["kind"])
    other = Usual("x_seconds", "Some text.", ["kind"], buckets=BOUNDS, registry=theirs)
    for kind, value in observed:
        one.labels(kind).observe(value)
        other.labels(kind).observe(value)
    assert page(ours) == page(theirs)


def test_histogram_of_errors_has_buckets_only() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("error", "Some text.", (-1.0, 0.0, 1.0), ours)
    other = Usual("error", "Some text.", buckets=(-1.0, 0.0, 1.0), registry=theirs)
    for value in (-3.0, -1.0, 0.5, 7.0):
        one.labels().observe(value)
        other.observe(value)
    assert page(ours) == [line for line in page(theirs) if "error_count" not in line]
    assert not any("error_sum" in line for line in page(ours))
