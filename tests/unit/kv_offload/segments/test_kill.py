"""A real process that stores is killed (SIGKILL) at any moment, and the next one finds its blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROUNDS = 24

SCRIPT = f"""
    import json, os, random, select, signal, sys, time
    from pathlib import Path
    from tests.unit.kv_offload.segments.rig import LIMIT_S, Rig, config, key
    from vllm_pd.kv_offload import byte_copy
    from vllm_pd.kv_offload.segments import block_pass

    rng = random.Random(5)
    # Compiled once, before any thread, for all the processes that are forked from this one.
    block_pass.prepare(), byte_copy.compiled()

    def settings(round: int):
        # Room for all, so that whatever is missing was lost; several unfinished segments in one folder.
        root = Path(sys.argv[1]) / str(round // 6)
        return config(root, budget_bytes=1 << 30, max_segment_bytes=72 * 8192)

    def work(first: int, pipe: int) -> None:
        rig = Rig(settings(first // 100_000))
        for i in range(first, first + 10_000, 10):
            rig.put(range(i, i + 10))
            rig.store.touch([key(n) for n in range(i, i + 3)])
            if i % 40 == 0:
                rig.store.flush(LIMIT_S)
            came, went = rig.store.take_changes(100_000)
            os.write(pipe, (json.dumps([[k.hex() for k in came], [k.hex() for k in went]]) + chr(10)).encode())

    lost = wrong = seen = killed = 0
    for round in range({ROUNDS}):
        out, into = os.pipe()
        child = os.fork()
        if not child:
            os.close(out)
            try:
                work(round * 100_000, into)
            finally:
                os._exit(1)
        os.close(into)
        raw, end = b"", None
        while True:
            ready, _, _ = select.select([out], [], [], 0.002)
            if ready:
                part = os.read(out, 1 << 16)
                if not part:
                    break
                raw += part
                end = end or time.monotonic() + rng.random() * 0.15
            if end and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                end = None
                killed += 1
                while part := os.read(out, 1 << 16):
                    raw += part
                break
        os.close(out)
        os.waitpid(child, 0)
        there = set()
        for line in raw.decode().split(chr(10))[:-1]:
            came, went = json.loads(line)
            there = (there | set(came)) - set(went)
        names = {{key(i).hex(): i for i in range(round * 100_000, round * 100_000 + 10_000)}}
        said = [names[name] for name in there if name in names]
        pid = os.fork()
        if not pid:
            with Rig(settings(round)) as rig:
                has = [n for n in range(round * 100_000, round * 100_000 + 10_000) if rig.store.contains(key(n))]
                got = rig.get(has)
                report = [len(has), len(has) - len(got.ok), len(set(said) - set(has))]
            Path(sys.argv[2]).write_text(json.dumps(report))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert not status, "what was left could not be read"
        found, bad, gone = json.loads(Path(sys.argv[2]).read_text())
        seen, wrong, lost = seen + found, wrong + bad, lost + gone
    print(json.dumps({{"killed": killed, "seen": seen, "wrong": wrong, "lost": lost}}))
"""


def test_a_process_that_is_killed_loses_at_most_what_it_was_writing(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(tmp_path / "root"), str(tmp_path / "report")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["wrong"], result["lost"]) == (0, 0)
    assert result["killed"] == ROUNDS and result["seen"] > 20 * ROUNDS
