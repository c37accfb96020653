"""The one thread that writes: adopts what earlier runs left, then takes batches, and makes room while it has time.

When a write fails, or there is no room, writing stops for a while: what is put meanwhile is refused at once, and one
sentence says so. The pause grows while the trouble lasts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from vllm_pd.kv_offload.segments.adopt import Adoption, Stopped
from vllm_pd.kv_offload.segments.batch import Batch
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.flight import IN_FLIGHT
from vllm_pd.kv_offload.segments.folder import SegmentFile
from vllm_pd.kv_offload.segments.log import SegmentLog
from vllm_pd.kv_offload.segments.outcome import Reason
from vllm_pd.kv_offload.segments.space import NoRoom
from vllm_pd.kv_offload.segments.staging import Staging

logger = logging.getLogger(f"vllm.{__name__}")

TICK_S = 1.0
LOOK_S = 5.0
"""How often the folder and the free space are looked at, besides after each new segment."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_ADOPTION_PAUSE_S = 0.001


class Writer:
    """
    Args:
        config: sizes.
        log: where to write; nobody else uses it.
        staging: where batches come from.
        clock: seconds.
    """

    def __init__(
        self,
        config: StoreConfig,
        log: SegmentLog,
        staging: Staging,
        counters: Counters,
        complaints: Complaints,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._log = log
        self._staging = staging
        self._counters = counters
        self._complaints = complaints
        self._clock = clock
        self._off: Reason | None = None
        self._off_until = 0.0
        self._pause_s = 0.0
        self._look_at = 0.0
        self._stopping = threading.Event()
        self._recovered = threading.Event()
        self._thread: threading.Thread | None = None
        log.wake = staging.wake

    def start(self, adoption: Callable[[Callable[[], None]], Adoption], files: tuple[SegmentFile, ...]) -> None:
        """
        Args:
            adoption: makes one that calls the given function to give way.
            files: that it is to adopt.
        """
        self._thread = threading.Thread(
            target=self._run, args=(adoption(self._give_way), files), name="vllm_pd_ssd_write", daemon=True
        )
        self._thread.start()

    @property
    def recovering(self) -> bool:
        """What earlier runs left is not all in the index yet."""
        return not self._recovered.is_set()

    @property
    def off(self) -> Reason | None:
        """Why writing stopped; None while it goes well."""
        return self._off

    @property
    def refusing(self) -> Reason | None:
        """Why nothing should be put now."""
        return self._off if self._off is not None and self._clock() < self._off_until else None

    @property
    def idle(self) -> bool:
        """All that was written is on the device."""
        return not self._log.unsynced

    def close(self, timeout_s: float) -> bool:
        """Write what is staged, finish the segment, end the thread. False if it hangs."""
        self._stopping.set()
        self._staging.hurry(True)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, adoption: Adoption, files: tuple[SegmentFile, ...]) -> None:
        try:
            adoption.run(files)
        except Stopped:
            pass
        except Exception:
            logger.exception("SSD tier: what earlier runs left was not all found.")
        self._recovered.set()
        while True:
            try:
                if not self._step():
                    return
            except Exception as e:
                # A thread that ended would leave the store accepting blocks until its memory is full.
                logger.exception("SSD tier: the writer failed.")
                self._stop(Reason.WRITE_FAILED, str(e))
                # What failed may fail again at once, and for ever.
                if self._stopping.is_set():
                    return
                self._stopping.wait(self._pause_s)

    def _step(self) -> bool:
        """One batch, or what there is to do without one. False at the end."""
        stopping = self._stopping.is_set()
        in_flight = self._log.in_flight
        batch = self._staging.take(TICK_S if in_flight else 0.0)
        if batch is None and in_flight:
            self._log.land_those_over()
            return True
        if batch is None:
            self._sync()
            if stopping:
                self._finish()
                return False
            again = self._make_room()
            batch = self._staging.take(0.0 if again else TICK_S)
        if batch is not None:
            self._write(batch)
            self._make_room()
        return True

    def _write(self, batch: Batch) -> None:
        # What became of the one before decides about this one.
        self._log.land(IN_FLIGHT - 1)
        reason = self.refusing
        if reason is None:
            try:
                self._log.begin(batch, partial(self._ended, batch))
                return
            except NoRoom as e:
                reason = Reason.NO_SPACE
                self._stop(reason, str(e))
            except OSError as e:
                reason = Reason.WRITE_FAILED
                self._failed(e)
            except BaseException:
                self._lost(batch, Reason.WRITE_FAILED)
                raise
        self._lost(batch, reason)

    def _ended(self, batch: Batch, error: OSError | None) -> None:
        if error is None:
            self._counters.add(written_blocks_total=len(batch), written_bytes_total=batch.disk_bytes)
            self._staging.done(batch)
            if self.refusing is None:
                # Else it was begun before writing stopped.
                self._resume()
            return
        self._failed(error)
        self._lost(batch, Reason.WRITE_FAILED)

    def _failed(self, error: OSError) -> None:
        # What was under way at the same time fails of the same.
        if self.refusing is None:
            self._counters.add(failed_writes_total=1)
            self._stop(Reason.WRITE_FAILED, f"{error}")

    def _lost(self, batch: Batch, reason: Reason) -> None:
        self._counters.count(self._counters.puts_lost, reason, len(batch))
        self._staging.done(batch)

    def _sync(self) -> None:
        try:
            self._log.sync()
        except OSError as e:
            self._failed(e)

    def _finish(self) -> None:
        try:
            self._log.finish()
        except OSError as e:
            self._complaints.say("footer", f"the last segment could not be finished ({e}).")

    def _make_room(self) -> bool:
        """One segment's worth. Returns whether that may not have been enough: then again at the next step."""
        now = self._clock()
        if now < self._look_at and not self._log.took_room:
            return False
        try:
            again = self._log.make_room()
        except OSError as e:
            self._complaints.say("evict", f"{self._config.root} cannot be kept within its limits ({e}).")
            again = False
        self._look_at = now if again else now + LOOK_S
        return again

    def _stop(self, reason: Reason, why: str) -> None:
        self._off = reason
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._off_until = self._clock() + self._pause_s
        self._look_at = 0.0
        self._complaints.say("write", f"nothing is stored for now: {why}. It is tried again.")

    def _resume(self) -> None:
        if self._off is not None:
            self._off, self._pause_s = None, 0.0
            self._complaints.is_over("write", "blocks are stored again.")

    def _give_way(self) -> None:
        if self._stopping.wait(_ADOPTION_PAUSE_S):
            raise Stopped
