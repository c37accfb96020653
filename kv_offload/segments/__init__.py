"""Fixed-size KV blocks in log-structured segment files. Knows neither vLLM nor torch.

Blocks are appended to one segment file after the other in batches; an index in memory says where each is, and is
rebuilt from the files at start. Space is won by evicting a whole segment. Nothing here is precious: a block that cannot
be proven to be what was stored is a miss.
"""

from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.outcome import Finished, Reason, StoreStats
from vllm_pd.kv_offload.segments.rows import Rows
from vllm_pd.kv_offload.segments.store import SegmentStore

__all__ = ["Finished", "Reason", "Rows", "SegmentStore", "StoreConfig", "StoreStats"]
