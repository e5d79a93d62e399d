"""A peer in a process of its own: one real engine over one registered buffer, and a few questions over pipes.

``python -m tests.engines.peer_process NBYTES`` is the child; :class:`PeerProcess` starts it, asks it, stops it, lets it
go on, and kills it, always by its own pid.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import TracebackType

import numpy as np

from orchestrator.engines import mooncake_env
from protocols.ids import Session


class PeerProcess:
    """``async with PeerProcess(nbytes) as peer``. Blocking work is done in threads: the loop under test stays free."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.session = Session("")
        self.address = 0

    async def __aenter__(self) -> PeerProcess:
        command = [sys.executable, "-m", "tests.engines.peer_process", str(self._nbytes)]
        self._child = await asyncio.to_thread(
            subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            name, address = (await asyncio.to_thread(self._answer)).split()
        except BaseException:
            await asyncio.to_thread(self._end)
            raise
        self.session, self.address = Session(name), int(address)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self._end)

    async def count(self, value: int, block: int, blocks: int) -> int:
        """How many of the first ``blocks`` blocks of ``block`` bytes hold nothing but ``value``."""
        return int(await asyncio.to_thread(self._ask, f"{value} {block} {blocks}"))

    async def stop(self) -> None:
        """Returns when all of its threads stand still, which is later than the signal."""
        os.kill(self._child.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, self._child.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    async def kill(self) -> None:
        self._child.kill()
        await asyncio.to_thread(self._child.wait)

    def _ask(self, question: str) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(question + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        while line := self._child.stdout.readline():
            if line.startswith("="):  # the native library writes to standard output as well
                return line[1:].strip()
        raise RuntimeError(f"the peer process ended with {self._child.wait()}")

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    native = mooncake_env.load().TransferEngine()
    assert native.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.zeros(int(sys.argv[1]), np.uint8)
    assert native.register_memory(memory.ctypes.data, memory.nbytes) == 0
    sys.stdout.write(f"=127.0.0.1:{native.get_rpc_port()} {memory.ctypes.data}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        value, block, blocks = (int(word) for word in line.split())
        whole = (memory[: block * blocks].reshape(blocks, block) == value).all(axis=1)
        sys.stdout.write(f"={int(whole.sum())}\n")
        sys.stdout.flush()
    os._exit(0)  # the parent is gone


if __name__ == "__main__":
    main()
