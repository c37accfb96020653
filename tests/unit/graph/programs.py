"""Small programs in the places of `vllm`, `vllm-pd-router` and `vllm-pd`: real processes with real sockets that start
at once, and fail when they are told to.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """#!{python} -SE
import os, signal, socket, sys, time

args = sys.argv[1:]
name = os.path.basename(sys.argv[0])
print(name, "begins", flush=True)
if "--crash" in args:
    print("loading", flush=True)
    sys.exit("ValueError: this model does not fit")
if "--deaf" in args:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for flag in [a for a in args if a.startswith("--hold=")]:
    while os.path.exists(flag[7:]):
        time.sleep(0.02)
if "--child" in args and os.fork() == 0:
    os.setsid()
    time.sleep(600)
    sys.exit()
if "--port" not in args:
    time.sleep(600)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(args[args.index("--port") + 1])))
server.listen(64)
while True:
    client, _ = server.accept()
    client.recv(65536)
    if "--never-ready" in args:
        client.sendall(b"HTTP/1.1 503 No\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    else:
        client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok")
    client.close()
"""


def write_programs(folder: Path) -> Path:
    """The three programs, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vllm", "vllm-pd-router", "vllm-pd"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder
