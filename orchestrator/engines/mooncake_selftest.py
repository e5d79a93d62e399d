"""``python -m orchestrator.engines.mooncake_selftest``: may the exported symbols of this very library be used?

Run in a process of its own, because a wrong assumption ends it. Two engines on the loopback network; every call of
:class:`~orchestrator.engines.mooncake_abi.Abi` is made and its answer compared with what is known. The last line of
output is a JSON list of the features that worked, and the exit code is 0; anything else means: use none of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from orchestrator.engines import mooncake_env
from orchestrator.engines.mooncake_abi import (
    BATCH_STATUS,
    COMPLETED,
    FAILED,
    FREE_ENGINE,
    OPEN_SEGMENT,
    UNKNOWN,
    WAITING,
    Abi,
    exported,
)

PATIENCE = 10.0
"""Seconds for any one step."""


def expect(truth: bool, what: str) -> None:
    if not truth:
        raise RuntimeError(what)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        expect(time.monotonic() < deadline, f"too slow: {what}")
        time.sleep(0.0005)


def engine(module: Any, memory: np.ndarray[Any, Any]) -> Any:
    native = module.TransferEngine()
    expect(native.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
    expect(native.register_memory(memory.ctypes.data, memory.nbytes) == 0, "register_memory")
    return native


def check_batches(native: Any, abi: Abi, session: str, src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """Batch status, task status and free: of a good batch, of one with a bad block, of a task that is not there."""
    here, there = src.ctypes.data, dst.ctypes.data

    def submit(blocks: Iterable[tuple[int, int, int]]) -> int:
        offsets, targets, lengths = (list(part) for part in zip(*blocks, strict=True))
        batch: int = native.batch_transfer_async_write(session, [here + o for o in offsets], targets, lengths)
        expect(batch != 0, "submit refused")
        return batch

    good = [(0, there, 1), (1000, there + 1000, 100), (8192, there + 8192, 4096), (1 << 17, there + (1 << 17), 1 << 16)]
    batch = submit(good)
    until(lambda: abi.batch_status(batch) != WAITING, "a good batch")
    expect(abi.batch_status(batch) == COMPLETED, "status of a good batch")
    expect(all(abi.task_status(batch, task) == COMPLETED for task in range(4)), "task status")
    expect(all((src[o : o + n] == dst[o : o + n]).all() for o, _, n in good), "bytes")
    expect(abi.task_status(batch, 4) == UNKNOWN, "status of a task that is not there")
    expect(abi.free(batch), "free")

    batch = submit([(0, there, 64), (0, there + (1 << 40), 64), (0, there + 64, 64)])
    until(lambda: abi.batch_status(batch) != WAITING, "a batch with a bad block")
    expect(abi.batch_status(batch) == FAILED, "status of a batch with a bad block")
    until(lambda: all(abi.task_status(batch, task) != WAITING for task in range(3)), "its tasks")
    states = [abi.task_status(batch, task) for task in range(3)]
    expect(states == [COMPLETED, FAILED, COMPLETED], f"states {states}")
    expect(abi.free(batch), "free after a failure")


def main() -> list[str]:
    module: Any = mooncake_env.load()
    features = exported(module.__file__)
    src = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    dst = np.zeros(1 << 20, np.uint8)
    writer, reader = engine(module, src), engine(module, dst)
    session = f"127.0.0.1:{reader.get_rpc_port()}"
    abi = Abi(module.__file__, writer.get_engine_ptr())
    if OPEN_SEGMENT in features:
        expect(abi.open_segment(session), "open_segment")
        expect(not abi.open_segment("127.0.0.1:1"), "open_segment of a closed port")
    if BATCH_STATUS in features:
        check_batches(writer, abi, session, src, dst)
    if FREE_ENGINE in features:
        abi.free_engine()
        del abi, writer
    return sorted(features)


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(main()) + "\n")
        sys.stdout.flush()
    except BaseException as error:  # whatever it is, the answer is no
        sys.stderr.write(f"self-test failed: {type(error).__name__}: {error}\n")
        os._exit(1)
    os._exit(0)  # native threads are still running; nothing of theirs is to be waited for
