"""``python -m scripts.soaking.worker ROLE FD JSON``: one worker process, started by `scripts.soaking.process.Worker`.

The main thread runs an asyncio loop that carries out commands, several at a time; kvferry has its embedded loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import traceback
from typing import Any

from scripts.soaking.process import LINE_LIMIT

PR_SET_PDEATHSIG = 1


async def serve(side: Any, ours: socket.socket) -> None:
    """Carry out commands until the maker's end is closed."""
    reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
    running: set[asyncio.Task[None]] = set()

    async def carry_out(command: dict[str, Any]) -> None:
        said: dict[str, Any] = {"id": command["id"]}
        try:
            said["value"] = await getattr(side, command["method"])(**command["arguments"])
        except Exception:
            said["error"] = traceback.format_exc()
        writer.write(json.dumps(said).encode() + b"\n")

    while line := await reader.readline():
        task = asyncio.create_task(carry_out(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)  # the maker is gone


def make(role: str, said: dict[str, Any]) -> Any:
    """The role's object; only its own imports."""
    if role == "prefill":
        from scripts.soaking.prefilling import Prefilling

        return Prefilling(**said)
    from scripts.soaking.decoding import Decoding

    return Decoding(**said)


def main(role: str, fd: int, said: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where this process is stopped when its maker ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the maker
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    asyncio.run(serve(make(role, said), socket.socket(fileno=fd)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
