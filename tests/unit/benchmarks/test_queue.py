"""The benchmark of the prefill queue does what it says, in small."""

from __future__ import annotations

from benchmarks import queue_rate


def test_every_job_goes_through_the_store() -> None:
    rows = queue_rate.measure(50, (4, 40))
    assert [(row["jobs in the queue"], row["jobs"]) for row in rows] == [(4, 50), (40, 50)]
    assert all(row["jobs/s"] > 0 and row["CPU us/job, claim and ack"] > 0 for row in rows)
