"""vLLM's own tiering on the CPU platform, which vLLM refuses: its manager and tiers, and our worker for the copies.

Imported by the server that is measured, not by the benchmark.
"""

from __future__ import annotations

from vllm_pd.kv_offload.spec import PDTieringOffloadingSpec
from vllm_pd.vllm_compat import OffloadingConfig, TieringOffloadingSpec


class FileTierSpec(PDTieringOffloadingSpec):
    """`secondary_tiers` are vLLM's, as they are given."""

    def __init__(self, config: OffloadingConfig) -> None:
        TieringOffloadingSpec.__init__(self, config)
        self._check_size()
