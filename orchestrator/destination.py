"""One destination of a prefill room: a decode rank's offer, its lane, and the ledger of what landed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.chunk import Chunk, ChunkData
from orchestrator.digest import hash_pages
from orchestrator.flow import Lane
from orchestrator.handover import Handover
from orchestrator.link import Link
from orchestrator.trace import Span
from protocols.blocks import Blocks, Ints, check_units, merge_runs, position_runs, summary
from protocols.codec import pack_indices, unpack_indices
from protocols.coverage import Ledger, Runs
from protocols.errors import MismatchError
from protocols.ids import RoomKey, Session
from protocols.layout import LayerBuffer, Layout, Pair
from protocols.leases import KINDS, UnitSet
from protocols.machines import ChunkEvent
from protocols.messages import AbortAck, Digest, Offer, Units
from protocols.planning import ChunkPlan, check_total, pair_blocks, plan_chunk, units_at

if TYPE_CHECKING:
    from orchestrator.prefill_room import PrefillRoom


class Destination:
    """Loop thread only. ``lane`` is None until first contact with the engine of its session has succeeded."""

    def __init__(self, link: Link, offer: Offer, layout: Layout, pairs: Sequence[Pair], page_size: int) -> None:
        """Raises MismatchError or MalformedFrameError for an offer that contradicts the peer's own layout (E5)."""
        self.link = link
        self.offer = offer
        self.session = Session(offer.session)
        self.dummy = offer.dummy
        self.pages = unpack_indices(offer.pages)
        self.state_rows = unpack_indices(offer.state_rows)
        self.total_tokens = offer.total_tokens
        if offer.prefix_tokens % page_size or offer.prefix_tokens > offer.total_tokens:
            raise MismatchError(
                "a prefix is a whole number of pages and not longer than the request",
                prefix_tokens=offer.prefix_tokens,
                total_tokens=offer.total_tokens,
                page_size=page_size,
            )
        self.prefix_pages = offer.prefix_tokens // page_size
        check_units(self.pages, layout.num_pages, "destination pages")
        check_units(self.state_rows, layout.units_of("state"), "destination state rows")
        if offer.aux_slot is not None:
            check_units(np.array([offer.aux_slot], np.int64), layout.units_of("aux"), "destination aux slots")
        self.lane: Lane | None = None
        self.plans: dict[int, ChunkPlan] = {}
        """By the chunk's start token."""
        self.ledger = Ledger()
        self.digests: list[Digest] = []
        self.bytes = 0
        self.blocks = 0
        self.committed = False
        self.in_doubt: list[tuple[Blocks, list[int]]] = []
        self.fenced = False
        """The engine of its session was deleted: what is in doubt cannot land any more."""
        self._layout = layout
        self._pairs = {pair.src.id: pair for pair in pairs}
        self._open: set[Handover] = set()

    @property
    def connected(self) -> bool:
        """Data can be written to it, or none will be."""
        return self.dummy or self.lane is not None

    def plan(self, data: ChunkData) -> ChunkPlan:
        """Which of the chunk's pages go where; kept in ``plans``. Raises MismatchError, with both lists in a few
        characters (E1)."""
        try:
            if data.last:
                check_total(data.end_token, self.total_tokens, self._layout.page_size, self.prefix_pages, self.pages)
            plan = plan_chunk(data.pages, data.positions, self.prefix_pages, self.pages)
        except MismatchError as exc:
            raise MismatchError(exc.what, **{**exc.data, "source": summary(data.pages)}) from exc
        self.plans[data.key.start_token] = plan
        return plan

    def pairs_of(self, buffers: Sequence[LayerBuffer]) -> list[Pair]:
        """These source buffers, paired with this destination's own."""
        return [self._pairs[buffer.id] for buffer in buffers]

    def post(
        self, room: PrefillRoom, chunk: Chunk, blocks: Blocks, span: Span, pairs: Sequence[Pair], runs: Runs
    ) -> None:
        """Hand blocks to the lane; when all of them landed the ledger says so, for these pairs at these positions."""
        if len(blocks) == 0:
            return
        assert self.lane is not None, "a room is ready only when every destination is connected"
        chunk.machine.fire(ChunkEvent.POST)

        def done(handover: Handover) -> None:
            self._open.discard(handover)
            if handover.landed:
                self.ledger.landed(
                    [pair.dst.id for pair in pairs], {pair.dst.id: pair.dst.item_len for pair in pairs}, runs
                )
                self.bytes += blocks.nbytes
                self.blocks += len(blocks)
            elif handover.in_doubt:
                self.in_doubt.append((blocks, handover.in_doubt))
            room.handover_done(self, chunk, handover)

        handover = Handover(room.outcome, blocks, span, done, lambda _, error: room.write_failed(self, error))
        self._open.add(handover)
        room.outstanding += 1
        chunk.outstanding += 1
        self.lane.post(handover)

    async def digest(self, data: ChunkData) -> None:
        """Add the hashes of a chunk's pages as they stand in the source now."""
        plan = None if self.dummy else self.plans[data.key.start_token]
        if plan is None or not plan.positions:
            return
        pairs = [pair for pair in self._pairs.values() if pair.src.unit == "page"]
        hashes = await hash_pages([pair.src for pair in pairs], plan.runs.source_pages())
        self.digests.append(Digest(tuple(pair.dst.id for pair in pairs), plan.positions, hashes))

    def predict(self, plan: ChunkPlan) -> float | None:
        """Seconds to move all of the room's pages here, alone on the link, if they lie as this chunk's do."""
        if self.lane is None or not plan.runs.pages:
            return None
        pages = [pair.dst for pair in self._pairs.values() if pair.src.unit == "page"]
        blocks = len(self.pages) * len(pages) * len(plan.runs) // plan.runs.pages
        nbytes = len(self.pages) * sum(buffer.item_len for buffer in pages)
        return self.lane.model.predict(nbytes, max(blocks, len(pages)))

    def aux_blocks(self, data: ChunkData) -> Iterator[tuple[list[Pair], Blocks, Runs]]:
        """Blocks of the aux slot and of the state rows, each with its positions. Raises MismatchError when only one
        side has them, or the counts differ."""
        if self.dummy:
            return
        aux = [pair for pair in self._pairs.values() if pair.src.unit == "aux"]
        if aux:
            if (data.aux_slot is None) != (self.offer.aux_slot is None):
                raise MismatchError("only one side has an aux slot", prefill=data.aux_slot, decode=self.offer.aux_slot)
            if data.aux_slot is not None and self.offer.aux_slot is not None:
                source = np.array([data.aux_slot], np.int64)
                check_units(source, min(pair.src.items for pair in aux), "source aux slots")
                yield aux, self._items(aux, source, np.array([self.offer.aux_slot], np.int64)), ((0, 1),)
        state = [pair for pair in self._pairs.values() if pair.src.unit == "state"]
        if state and (len(data.state_rows) or len(self.state_rows)):
            check_units(data.state_rows, min(pair.src.items for pair in state), "source state rows")
            runs = position_runs(np.arange(len(self.state_rows), dtype=np.int64))
            yield state, self._items(state, data.state_rows, self.state_rows), runs

    def _items(self, pairs: list[Pair], source: Ints, target: Ints) -> Blocks:
        assert self.lane is not None, "a room is ready only when every destination is connected"
        return pair_blocks(merge_runs(source, target), pairs, self.lane.max_block_bytes)

    def stop(self, key: RoomKey) -> None:
        if self.lane is not None:
            self.lane.stop(key)

    def abort_ack(self, key: RoomKey) -> AbortAck:
        """What is not quiet here: FAILED blocks are in doubt, blocks still running are unknown; the rest is quiet, and
        all of it once the session is fenced."""
        if self.fenced:
            return AbortAck(room=key.room, gen=key.gen, session=self.session)
        in_doubt = [units_at(self._layout, blocks, indices) for blocks, indices in self.in_doubt]
        unknown = []
        for handover in self._open:
            unknown.append(units_at(self._layout, handover.blocks, handover.unfinished()))
            in_doubt.append(units_at(self._layout, handover.blocks, handover.in_doubt))
        return AbortAck(
            room=key.room, gen=key.gen, session=self.session, unknown=_units(unknown), in_doubt=_units(in_doubt)
        )


def _units(parts: list[UnitSet]) -> Units:
    if not any(len(part) for part in parts):
        return Units()
    pages, aux, state = (np.unique(np.concatenate([part.of(kind) for part in parts])) for kind in KINDS)
    return Units(pack_indices(pages), tuple(aux.tolist()), pack_indices(state))
