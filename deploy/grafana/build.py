"""Writes the dashboard, `deploy/grafana/vllm-pd.json`, from the rows beside this file.

python -m deploy.grafana.build          # write it
python -m deploy.grafana.build --check  # exit 1 if what is there is not what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.caches import CACHES, STORE
from deploy.grafana.control import ACTIONS, PLANNER, ROUTER
from deploy.grafana.model import Variable, dashboard
from deploy.grafana.service import ERRORS, OVERVIEW, SERVICE
from deploy.grafana.workers import HANDOVER, QUEUE, WORKERS

FILE = Path(__file__).with_name("vllm-pd.json")
ROWS = (OVERVIEW, SERVICE, WORKERS, QUEUE, HANDOVER, CACHES, ERRORS, PLANNER, STORE, ROUTER)


def build() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return dashboard(
        uid="vllm-pd",
        title="vllm-pd",
        text="One vllm-pd cluster: what clients get, workers, caches, planner. Made by deploy/grafana/build.py.",
        rows=ROWS,
        variables=(
            Variable("pool", "Pool", "label_values(vllm_pd_router_worker_info, pool)"),
            Variable("worker", "Worker", 'label_values(vllm_pd_router_worker_info{pool=~"$pool"}, worker)'),
        ),
        events=(ACTIONS,),
    )


def text() -> str:
    """What the file holds."""
    return json.dumps(build(), indent=1, sort_keys=True) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args(argv).check:
        if FILE.read_text() != text():
            print(f"{FILE} is not what its source says; run python -m deploy.grafana.build.")
            return 1
        return 0
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
