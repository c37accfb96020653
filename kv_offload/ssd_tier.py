"""vLLM's file tier, kept within a budget.

A file may be deleted between the lookup that found it and the load. vLLM's tier then reports the load as failed from
that block on, marks those blocks as absent for the waiting requests, and the request goes on with the blocks before
them and recomputes the rest; it neither fails nor asks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.ssd_budget import Limits, SsdBudget, default_floor
from vllm_pd.kv_offload.ssd_inventory import SsdInventory
from vllm_pd.vllm_compat import FileSystemTierManager, OffloadingEvent, TierJobResult, TierTransferJob

_EVENTS_PER_STEP = 1000
"""Blocks: what an earlier run left must not hold up a step."""


class BoundedFileTier(FileSystemTierManager):  # type: ignore[misc]
    """Runs in the scheduler process; built by vLLM's SecondaryTierFactory from `ssd_config.tier_config`.

    Args:
        root_dir: folder of this kind of block.
        sweep_root: folder that the budget is for; `root_dir` is inside.
        budget_bytes: what `sweep_root` may take.
        floor_bytes: free space to keep on the file system; None for the default.
        options: as vLLM's file tier.

    Raises:
        SettingsError: the folder cannot be made or written.
    """

    def __init__(
        self, *, root_dir: str, sweep_root: str, budget_bytes: int, floor_bytes: int | None = None, **options: Any
    ) -> None:
        root = Path(sweep_root)
        try:
            # The files themselves are readable by all as vLLM writes them; the folder keeps others out.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.chmod(0o700)
            Path(root_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise SettingsError(
                f"The SSD tier cannot use {root} ({e.strerror}); give --pd-ssd-path a folder that this user can write."
            ) from None
        floor = default_floor(root) if floor_bytes is None else floor_bytes
        super().__init__(root_dir=root_dir, **options)
        self._refused: list[int] = []
        self._admitted: dict[int, tuple[bytes, ...]] = {}
        self._inventory: SsdInventory | None = None
        # vLLM's own events of this tier say what was written, but neither what was there nor what was deleted.
        if options["offloading_spec"].kv_events_config.enable_kv_cache_events:
            self._inventory = SsdInventory(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}")
        self._budget = SsdBudget(root, Limits(budget_bytes, floor), watcher=self._inventory)
        self._budget.start()

    def submit_store(self, job_metadata: TierTransferJob) -> None:
        """Write blocks, or drop them when they do not fit: the blocks stay in the tier above."""
        keys = tuple(job_metadata.keys)
        if self._budget.admit(len(keys), self.block_size_bytes):
            self._admitted[job_metadata.job_id] = keys
            super().submit_store(job_metadata)
        else:
            self._refused.append(job_metadata.job_id)

    def get_finished_jobs(self) -> Iterable[TierJobResult]:
        refused, self._refused = self._refused, []
        finished = list(super().get_finished_jobs())
        for result in finished:
            if keys := self._admitted.pop(result.job_id, ()):
                self._budget.settle(len(keys), self.block_size_bytes)
                if result.success and self._inventory is not None:
                    self._inventory.written(keys)
        return [*(TierJobResult(job_id=job_id, success=False) for job_id in refused), *finished]

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Block files that came and went, a bounded number for each scheduler step."""
        if self._inventory is None:
            return
        came, went = self._inventory.take_changes(_EVENTS_PER_STEP)
        if went:
            yield OffloadingEvent(keys=went, medium=self.medium, removed=True, locality=self.locality)
        if came:
            yield OffloadingEvent(keys=came, medium=self.medium, removed=False, locality=self.locality)

    def shutdown(self) -> None:
        self._budget.stop()
        super().shutdown()
