# ruff: noqa: T201 – an example talks to a person
# The README shows everything between the two markers; tests/docs/test_examples.py keeps both equal.
# [README begins]
"""The KV cache of a prompt, from a prefill process to a decode process: python docs/examples/embed.py"""

import multiprocessing
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np

from orchestrator import ChunkSpec, Config, EmbeddedLoop, LayerBuffer, Layout
from orchestrator.engines import MooncakeEngine
from orchestrator.pages.ranges import ChunkCursor, Range
from protocols.errors import KvferryError

PAGES, PAGE_SIZE, TOKEN_BYTES, LAYERS = 128, 16, 512, 12  # page size in tokens
PROMPT, CHUNK = 1000, 300  # tokens of the prompt, tokens per forward
ROOM, GEN = 7, 1  # your router mints both with the request: a reused room id is a new generation
CONFIG = Config(room_timeout_s=30)  # every room ends by its deadline, whatever is missing


def compute(kind: str, layer: int) -> np.ndarray:
    """Stands for the model: what one layer writes for each token of the prompt."""
    rng = np.random.default_rng([ord(kind), layer])
    return rng.integers(0, 256, (PROMPT, TOKEN_BYTES), np.uint8)


class Pool:
    """Stands for your KV pool: K and V of every layer, aux slots, and a scratch buffer for first contact."""

    def __init__(self) -> None:
        shape = PAGES, PAGE_SIZE * TOKEN_BYTES
        self.kv = {(kind, layer): np.zeros(shape, np.uint8) for layer in range(LAYERS) for kind in "kv"}
        self.aux, self.scratch = np.zeros((8, 64), np.uint8), np.zeros((1, 64), np.uint8)
        arrays = {**self.kv, ("aux", 0): self.aux, ("scratch", 0): self.scratch}
        buffers = [
            LayerBuffer(id=i, kind=kind, layer=layer, address=a.ctypes.data, nbytes=a.nbytes, item_len=a.strides[0])
            for i, ((kind, layer), a) in enumerate(arrays.items())
        ]
        self.layout = Layout(
            page_size=PAGE_SIZE, dtype="uint8", contract="my-engine 1.0", num_layers=LAYERS, buffers=tuple(buffers)
        )


def chunk(final: Range, pages: np.ndarray, slot: int) -> ChunkSpec:
    """What one forward makes final. Aux (here: the first token) goes once, with the last chunk."""
    first, count = final.positions(PAGE_SIZE)
    return ChunkSpec(
        room=ROOM,
        gen=GEN,
        start_token=final.start_token,
        end_token=final.end_token,
        pages=pages[first : first + count],
        last=final.last,
        aux_slot=slot if final.last else None,
    )


def prefill(other: Connection) -> None:
    pool, slot, free = Pool(), 3, threading.Event()
    pages = np.random.default_rng(1).permutation(PAGES)[: -(-PROMPT // PAGE_SIZE)]  # your allocator's
    with EmbeddedLoop(CONFIG) as loop:
        worker = loop.start_prefill(MooncakeEngine(), pool.layout)
        other.send(worker.address)
        cursor = ChunkCursor(PAGE_SIZE)  # what a chunk leaves in a started page rides with the next chunk
        for start in range(0, PROMPT, CHUNK):
            end = min(start + CHUNK, PROMPT)
            final = cursor.advance(end, last=end == PROMPT)
            token = np.arange(start, end)
            row = pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE
            # Leaving the block ends the pass; leaving it by an exception gives its chunks back.
            with worker.begin_forward([chunk(final, pages, slot)] if final else []) as forward:
                for layer in range(LAYERS):
                    for kind in "kv":
                        pool.kv[kind, layer].reshape(-1, TOKEN_BYTES)[row] = compute(kind, layer)[start:end]
                    forward.layer_end(layer)
                pool.aux[slot, :2] = 4, 2  # the first token, say: final before the pass ends
        worker.on_source_free(ROOM, GEN, free.set)
        result = worker.wait(ROOM, GEN)  # your scheduler would poll(ROOM, GEN)
        free.wait()  # only now may the pages be given to another request, success or not
        if result.error:
            raise result.error
        print(f"prefill: {result.bytes} bytes in {result.chunks} chunks, {result.layers_fired} layers overlapped")


def decode(other: Connection) -> None:
    pool, slot = Pool(), 5
    pages = np.random.default_rng(2).permutation(PAGES)[: -(-PROMPT // PAGE_SIZE)]
    with EmbeddedLoop(CONFIG) as loop:
        worker = loop.start_decode(MooncakeEngine(), pool.layout, renew=MooncakeEngine)
        handle = worker.expect(ROOM, GEN, [other.recv()], pages, total_tokens=PROMPT, aux_slot=slot)
        result = handle.wait()  # or handle.poll(), or: await handle
        if result.error:
            raise result.error  # pages and slot are yours again only when handle.units_free() says so
        for (kind, layer), array in pool.kv.items():
            got = array[pages].reshape(-1, TOKEN_BYTES)[:PROMPT]
            assert np.array_equal(got, compute(kind, layer)), f"{kind}[{layer}] differs"
        print(f"decode: {len(pages)} pages of {LAYERS} layers equal, first token {pool.aux[slot, :2].tolist()}")


def run(side: str, other: Connection) -> None:
    try:
        {"prefill": prefill, "decode": decode}[side](other)
    except (KvferryError, EOFError) as error:
        sys.exit(f"{side}: {error or 'the other side has ended'}")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")  # never fork a process that has an engine
    ends = context.Pipe()
    sides = [context.Process(target=run, args=pair) for pair in zip(("prefill", "decode"), ends, strict=True)]
    for process in sides:
        process.start()
    for end in ends:
        end.close()
    for process in sides:
        process.join()
    sys.exit(any(process.exitcode for process in sides))
# [README ends]
