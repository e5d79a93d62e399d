"""An optional hash of every page, by whom sent it and by whom received it (N5).

Coverage proves that every byte was written once by the right block; the digest also proves that the bytes are those of
the source as it stood when the room concluded, so a layer that was read too early, or a page that was reused under the
transfer, cannot be committed. It reads all bytes once on each side, in slices between which the loop runs, and needs
pools in host memory. The hash is XXH3 of the xxhash library (64 bits): fast, not cryptographic.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any

import xxhash

from protocols.blocks import Ints
from protocols.errors import MismatchError
from protocols.layout import LayerBuffer
from protocols.messages import Coverage, Digest

SLICE_BYTES = 1 << 20
"""Bytes hashed before other callbacks of the loop get a turn: about 0.1 ms."""


async def hash_pages(buffers: Sequence[LayerBuffer], pages: Ints) -> bytes:
    """One 64-bit hash a page, over its bytes in these buffers. Reads host memory at the buffers' addresses.

    Cancelling it is harmless.
    """
    hashes = bytearray()
    budget = SLICE_BYTES
    for page in pages.tolist():
        hasher = xxhash.xxh3_64()
        for buffer in buffers:
            hasher.update(_bytes_at(buffer.address + page * buffer.item_len, buffer.item_len))
            budget -= buffer.item_len
        hashes += hasher.intdigest().to_bytes(8, "little")
        if budget <= 0:
            budget = SLICE_BYTES
            await asyncio.sleep(0)
    return bytes(hashes)


async def check_digests(
    digests: Sequence[Digest],
    coverage: Sequence[Coverage],
    buffers: dict[int, LayerBuffer],
    pages: Ints,
    prefix_pages: int,
) -> None:
    """Compare a rank's digests with what lies in our pages. Raises MismatchError naming the first position that
    differs, and for digests that do not stand for exactly the pages the rank covers."""
    paged = [(_paged(entry.buffers, buffers), entry.runs) for entry in coverage]
    claimed = [(digest.buffers, digest.runs) for digest in digests]
    # Counted before it is spelt out: coverage was proven, but a digest may claim 2**60 positions, or no buffer.
    if _count(claimed) != _count(paged) or not all(numbers for numbers, _ in claimed):
        raise MismatchError("the digests do not stand for the pages that were covered")
    if _by_buffer(claimed) != _by_buffer(paged):
        raise MismatchError("the digests do not stand for the pages that were covered")
    for digest in digests:
        positions = [position for first, count in digest.runs for position in range(first, first + count)]
        if len(digest.hashes) != 8 * len(positions):
            raise MismatchError("a digest has not one hash a page", pages=len(positions), bytes=len(digest.hashes))
        ours = await hash_pages(
            [buffers[number] for number in digest.buffers], pages[_offsets(positions, prefix_pages)]
        )
        if ours != digest.hashes:
            bad = next(i for i in range(len(positions)) if ours[8 * i : 8 * i + 8] != digest.hashes[8 * i : 8 * i + 8])
            raise MismatchError("a page does not hold what was sent", position=positions[bad], first_of=len(positions))


def _offsets(positions: list[int], prefix_pages: int) -> list[int]:
    return [position - prefix_pages for position in positions]


def _paged(numbers: Sequence[int], buffers: dict[int, LayerBuffer]) -> list[int]:
    """An entry of the coverage may name an aux or state buffer beside pages: like runs, items of one length."""
    return [number for number in numbers if buffers[number].unit == "page"]


def _count(parts: Any) -> int:
    """How many positions, of all buffers together."""
    return sum(len(numbers) * sum(count for _, count in runs) for numbers, runs in parts)


def _by_buffer(parts: Any) -> dict[int, list[int]]:
    """Positions by buffer, sorted."""
    found: dict[int, list[int]] = {}
    for numbers, runs in parts:
        for number in numbers:
            positions = found.setdefault(number, [])
            for first, count in runs:
                positions.extend(range(first, first + count))
    return {number: sorted(positions) for number, positions in found.items()}


def _bytes_at(address: int, length: int) -> Any:
    return (ctypes.c_char * length).from_address(address)
