"""Ends what a supervisor started when the supervisor is gone, however it went: `python -m vllm_pd.graph.guard`.

It waits on a pipe that the supervisor holds open. However the supervisor ends, kill -9 included, the pipe closes. A
supervisor that ends in order has nothing left on its record then. The guard also holds the graph's lock, which it
inherited: nobody starts the graph anew before it is done.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from vllm_pd.graph import remains, runs
from vllm_pd.graph.runs import RunFolder


def main(argv: list[str] | None = None) -> int:
    """Argument: the folder of the run. Returns when the supervisor is gone and so are its processes."""
    (path,) = sys.argv[1:] if argv is None else argv
    # Whatever ends a whole group of processes must not end the one that is to clean up after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    record = runs.read_record(RunFolder(Path(path)))
    if record is not None:
        remains.end(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
