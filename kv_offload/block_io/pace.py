"""When to look whether a transfer is over. Pure.

A look costs processor time, and one that comes late leaves the disk idle. So the first is made when most of the time
has passed that the transfers before took, and the others follow at a small part of that time. The processor time
matters more than it seems: the threads of a virtual disk share the cores with us, and with both cores of a small
machine busy it gives a quarter less.
"""

from __future__ import annotations

from collections.abc import Iterator

FASTEST = 16e9
"""Bytes a second that no single disk moves: looking earlier than this allows is in vain."""

TELLING_BYTES = 4 << 20
"""A shorter transfer is mostly overhead: it does not say how fast the disk is, and is looked at early."""

FIRST_LOOK = 0.75
"""Of the time that is expected. A disk that has become faster is so seen to be by a third at once."""
LOOKS = 40
"""Pauses in the time that is expected: what is seen late is a part of this at most."""
LONGEST_NAP_S = 0.05

FIRST_PAUSE_S, PAUSE_FACTOR, LAST_PAUSE_S = 20e-6, 1.5, 100e-6
"""Where nothing is expected. On a busy machine a pause is long, whatever was asked."""

PATIENT_AFTER_S, PATIENT_PAUSE_S = 0.1, 1e-3
"""What takes this long waits for a disk in trouble, not for us."""

_SLOWER_BY = 0.1


class Pace:
    """How fast transfers of one kind were."""

    def __init__(self) -> None:
        self._speed = 0.0

    def pauses(self, size: int) -> Iterator[float]:
        """Seconds to wait before each look at a transfer of `size` bytes that was just begun, without end."""
        first, least = size / FASTEST, 0.0
        if self._speed and size >= TELLING_BYTES:
            expected = size / self._speed
            first, least = max(first, min(LONGEST_NAP_S, FIRST_LOOK * expected)), expected / LOOKS
        yield first
        waited, pause = first, FIRST_PAUSE_S
        while True:
            step = PATIENT_PAUSE_S if waited > PATIENT_AFTER_S else min(PATIENT_PAUSE_S, max(pause, least))
            yield step
            waited += step
            pause = min(pause * PAUSE_FACTOR, LAST_PAUSE_S)

    def took(self, size: int, seconds: float) -> None:
        """A transfer is over. A faster one is believed at once, slower ones by and by: looking early costs less than
        looking late."""
        if size >= TELLING_BYTES and seconds > 0:
            speed = size / seconds
            self._speed = max(speed, self._speed + _SLOWER_BY * (speed - self._speed))
