"""What a scheduler step of the `pd` connector tells the workers, beside what its children tell theirs."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pd.connectors.read_leases import ReadLease
from vllm_pd.vllm_compat import MultiKVConnectorMetadata


@dataclass
class PDMetadata(MultiKVConnectorMetadata):
    """Immutable by use; vLLM's base is not frozen."""

    released: tuple[str, ...] = ()
    """Finished requests whose blocks nobody will read."""
    new_leases: tuple[ReadLease, ...] = ()
    """Of hand-offs that have arrived since the step before."""
