"""What the Kubernetes actuator asks of a cluster, and what can go wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vllm_pd.errors import PDError
from vllm_pd.planner.actuators.kubernetes_model import Pod, Seen, Workload


class Refused(PDError):
    """The API server refused, nothing was changed; the message is a sentence that says what to do."""


class NotKnown(Refused):
    """The API server does not know who asks: credentials have run out, and must be read anew."""


class Conflict(PDError):
    """What was to be changed had changed meanwhile; nothing was."""


class Unanswered(PDError):
    """No answer came: whether anything was changed is not known."""


class Cluster(Protocol):
    """One namespace of a cluster. Every method raises `Refused` or `Unanswered`, and has a deadline of its own."""

    async def look(self) -> Seen:
        """The workloads and their pods."""

    async def read(self, workload: Workload) -> Workload:
        """As it is now. Raises Refused also when it starts no workers any more."""

    async def annotate(self, workload: Workload, annotations: Mapping[str, str]) -> Workload:
        """Set annotations if its `version` is still the newest; as it is then. Raises Conflict when it is not."""

    async def set_scale(self, workload: Workload, replicas: int) -> None:
        """Change its replicas if its `version` is still the newest. Raises Conflict when it is not."""

    async def mark(
        self, pod: Pod, *, labels: Mapping[str, str | None], annotations: Mapping[str, str | None] | None = None
    ) -> None:
        """Set labels and annotations of exactly this pod; None removes one.

        Raises Conflict when there is another of its name, and Refused when there is none.
        """

    async def close(self) -> None:
        """Release connections. Idempotent."""
