"""The demo's controls change exactly the bytes they say, and nothing that is counted."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.demo.inject import faulty
from orchestrator.engines.faulty import FaultyEngine
from orchestrator.engines.loopback import LoopbackFabric
from protocols.blocks import Blocks
from protocols.layout import LayerBuffer

ITEM = 64


def buffers() -> tuple[LayerBuffer, ...]:
    """Four layers of K and V and one draft pair, each of two pages, one after the other from address 0x1000."""
    names = [(kind, layer, True) for layer in range(4) for kind in ("k", "v")]
    names += [("draft_k", 4, False), ("draft_v", 4, False), ("aux", 0, False)]
    return tuple(
        LayerBuffer(
            id=i, kind=kind, layer=layer, address=0x1000 * (i + 1), nbytes=2 * ITEM, item_len=ITEM, hooked=hooked
        )
        for i, (kind, layer, hooked) in enumerate(names)
    )


def everything() -> Blocks:
    """One block per page of every buffer."""
    src = np.array([buffer.address + page * ITEM for buffer in buffers() for page in range(2)], np.int64)
    return Blocks(src, src + 0x100000, np.full(len(src), ITEM, np.int64))


def rewritten(inject: str) -> tuple[Blocks, Blocks]:
    engine = faulty(LoopbackFabric().engine(), inject, buffers())
    assert isinstance(engine, FaultyEngine)
    rewrite = engine.faults[0].rewrite
    assert rewrite is not None
    return everything(), rewrite(everything())


@pytest.mark.parametrize(
    "inject, missing", [("drop-layer", ["k[2]", "v[2]"]), ("skip-draft", ["draft_k[4]", "draft_v[4]"])]
)
def test_blocks_of_some_buffers_are_left_out(inject: str, missing: list[str]) -> None:
    before, after = rewritten(inject)
    gone = set(before.src.tolist()) - set(after.src.tolist())
    assert gone == {b.address + page * ITEM for b in buffers() if b.name in missing for page in range(2)}
    assert len(after) == len(before) - 4


def test_a_corrupt_page_is_read_from_the_wrong_place_and_lands_in_the_right_one() -> None:
    before, after = rewritten("corrupt-page")
    assert after.dst.tolist() == before.dst.tolist()
    assert after.length.tolist() == before.length.tolist()
    names = {b.address + page * ITEM: b.name for b in buffers() for page in range(2)}
    changed = [(names[a], names[b]) for a, b in zip(before.src.tolist(), after.src.tolist(), strict=True) if a != b]
    assert changed == [("k[2]", "v[2]")] * 2
