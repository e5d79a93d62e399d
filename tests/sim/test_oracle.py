"""The byte oracle: each rule broken by hand, one at a time, and the right violation named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.testing.oracle import Grant, Oracle, Side
from orchestrator.testing.pool import Pool
from orchestrator.testing.simengine import SimEngine
from orchestrator.testing.simfabric import SimFabric
from orchestrator.testing.simflight import Flight, SimBatch
from orchestrator.testing.simmemory import POISON_TOKEN, Item, Memory, describe_token, pack, unpack
from orchestrator.testing.virtual import Domain
from protocols.blocks import Blocks
from protocols.ids import RoomKey

KEY, OTHER = RoomKey(7, 1), RoomKey(8, 1)


def make_pool() -> Pool:
    return Pool(pages=4, layers=1, drafts=0, page_size=2, item_len=8, kind="mla", aux_slots=2, aux_len=8)


class Table:
    """One prefill and one decode, of which the prefill has computed room 7: positions 0 and 1 in its pages 2 and 3."""

    def __init__(self) -> None:
        self.fabric = SimFabric()
        self.history: list[str] = []
        self.oracle = Oracle(self.fabric, lambda: 0.0, lambda actor, verb, *_: self.history.append(f"{actor} {verb}"))
        self.prefill, self.writer = self._side("P0")
        self.decode, self.reader = self._side("D0")
        self.source = self.oracle.source_granted(self.prefill, KEY, [(("page", 2), 0), (("page", 3), 1)])
        self.target = self.oracle.granted(self.decode, KEY, [(("page", 1), 0), (("page", 0), 1)])
        for page, position in ((2, 0), (3, 1)):
            self.write(page, position)

    def _side(self, name: str) -> tuple[Side, SimEngine]:
        domain, memory = Domain(name), Memory(make_pool())
        engine = SimEngine(self.fabric, name, domain=domain, port=hash(domain) % 1000)
        for buffer in memory.layout.buffers:
            engine.register(buffer.address, buffer.nbytes)
        return self.oracle.side(domain, name, memory), engine

    def page(self, side: Side, number: int) -> Item:
        return Item(side.memory.buffers[0], number)

    def write(self, page: int, position: int, key: RoomKey = KEY, attempt: int = 1) -> None:
        self.oracle.wrote(self.prefill, key, self.page(self.prefill, page), position, attempt)

    def block(self, source: int, target: int) -> Flight:
        """A block from one page to one page, queued."""
        blocks = Blocks.empty()
        batch = SimBatch(self.writer, self.reader.session, blocks)
        src, dst = self.page(self.prefill, source).address, self.page(self.decode, target).address
        flight = Flight(len(self.fabric.live) + 1, batch, 0, src, dst, 8, "lands")
        self.fabric.live[flight.number] = flight
        return flight

    def read(self, flight: Flight) -> None:
        side = self.prefill
        item = side.memory.items_at(flight.src, 8)[0]
        flight.data = side.memory.read(item).to_bytes(8, "little")
        flight.target = self.reader
        self.oracle.on_read(flight)

    def land(self, flight: Flight) -> None:
        self.oracle.on_landing(flight, 0, 8)
        assert flight.data is not None
        self.decode.memory.write(self.decode.memory.items_at(flight.dst, 8)[0], int.from_bytes(flight.data, "little"))
        del self.fabric.live[flight.number]

    def carry(self, source: int, target: int) -> None:
        flight = self.block(source, target)
        self.read(flight)
        self.land(flight)

    def names(self) -> list[str]:
        return [violation.name for violation in self.oracle.violations]


def test_a_faultless_room_breaks_nothing() -> None:
    table = Table()
    table.carry(2, 1)
    table.carry(3, 0)
    table.oracle.ended(table.decode, KEY, "SUCCESS")
    table.oracle.committed(table.decode, table.target)
    table.oracle.prefill_succeeded(table.prefill, KEY, 1)
    table.oracle.released(table.decode, table.target)
    table.oracle.source_released(table.prefill, table.source, POISON_TOKEN)
    table.oracle.granted(table.decode, OTHER, [(("page", 1), 0)])
    assert table.names() == []
    assert (table.oracle.commits, table.oracle.checked_landings) == (1, 2)


def read_a_page_that_no_kernel_wrote(table: Table) -> None:
    other = table.oracle.source_granted(table.prefill, OTHER, [(("page", 0), 0)])
    assert isinstance(other, Grant)
    table.read(table.block(0, 1))


def read_a_page_that_was_freed(table: Table) -> None:
    table.oracle.source_released(table.prefill, table.source, POISON_TOKEN)
    table.read(table.block(2, 1))


def free_a_source_that_is_still_read(table: Table) -> None:
    table.block(2, 1)
    table.oracle.source_released(table.prefill, table.source, POISON_TOKEN)


def rewrite_a_source_that_is_still_read(table: Table) -> None:
    table.block(2, 1)
    table.write(2, 0, attempt=2)


def land_where_nobody_is(table: Table) -> None:
    table.carry(2, 3)


def land_at_the_wrong_position(table: Table) -> None:
    table.carry(2, 0)


def land_twice(table: Table) -> None:
    table.carry(2, 1)
    table.carry(2, 1)


def land_in_another_room(table: Table) -> None:
    flight = table.block(2, 1)
    table.read(flight)
    table.oracle._forget(table.decode, table.target)
    table.oracle.granted(table.decode, OTHER, [(("page", 1), 0)])
    table.oracle.violations.clear()
    table.land(flight)


def land_after_the_commit(table: Table) -> None:
    late = table.block(2, 1)
    table.read(late)
    table.carry(2, 1)
    table.carry(3, 0)
    table.oracle.committed(table.decode, table.target)
    table.oracle.violations.clear()
    table.land(late)


def commit_under_a_write(table: Table) -> None:
    table.carry(2, 1)
    table.carry(3, 0)
    table.read(table.block(3, 0))
    table.oracle.committed(table.decode, table.target)


def commit_with_a_page_missing(table: Table) -> None:
    table.carry(2, 1)
    table.oracle.committed(table.decode, table.target)


def commit_what_was_computed_again(table: Table) -> None:
    table.carry(2, 1)
    table.carry(3, 0)
    table.write(3, 1, attempt=2)
    table.oracle.committed(table.decode, table.target)


def free_under_a_write(table: Table) -> None:
    table.read(table.block(2, 1))
    table.oracle.released(table.decode, table.target)


def grant_under_a_queued_write(table: Table) -> None:
    table.oracle.released(table.decode, table.target)
    table.block(2, 1)
    table.oracle.granted(table.decode, OTHER, [(("page", 1), 0)])


def end_twice(table: Table) -> None:
    table.oracle.ended(table.prefill, KEY, "FAILED")
    table.oracle.ended(table.prefill, KEY, "SUCCESS")


def succeed_before_the_decode_committed(table: Table) -> None:
    table.oracle.prefill_succeeded(table.prefill, KEY, 1)


@pytest.mark.row("N2")
@pytest.mark.parametrize(
    "scene, violation",
    [
        (read_a_page_that_no_kernel_wrote, "V2 read before final"),
        (read_a_page_that_was_freed, "V2 read after free"),
        (free_a_source_that_is_still_read, "V2 source freed under a read"),
        (rewrite_a_source_that_is_still_read, "V2 rewritten under a read"),
        (land_where_nobody_is, "V3 landed in a free unit"),
        (land_at_the_wrong_position, "V1 landed in the wrong place"),
        (land_twice, "V1 landed twice"),
        (land_in_another_room, "V3 landed in another room's unit"),
        (land_after_the_commit, "V3 landed after commit"),
        (commit_under_a_write, "V3 committed under a write"),
        (commit_with_a_page_missing, "V1 committed without its bytes"),
        (commit_what_was_computed_again, "V1 committed without its bytes"),
        (free_under_a_write, "V3 freed under a write"),
        (grant_under_a_queued_write, "V3 granted under a write"),
        (end_twice, "V4 two outcomes"),
        (succeed_before_the_decode_committed, "V4 success before commit"),
    ],
)
def test_one_rule_broken_is_one_violation_named(scene: Callable[[Table], None], violation: str) -> None:
    table = Table()
    scene(table)
    assert table.names() == [violation]
    assert f"ORACLE {violation}" in table.history


def test_a_token_tells_what_it_is() -> None:
    number = pack(RoomKey(65535, 255), 99, 65535, 255)
    token = unpack(number)
    assert token is not None
    assert (token.key, token.buffer, token.position, token.attempt) == (RoomKey(65535, 255), 99, 65535, 255)
    assert describe_token(number) == "room 65535.255 position 65535 of buffer 99, attempt 255"
    assert describe_token(POISON_TOKEN) == "poison"
    assert describe_token(2) == "garbage 0x2"


def test_memory_finds_items_by_address() -> None:
    memory = Memory(make_pool())
    layer, aux = memory.buffers
    assert memory.items_at(layer.address + 8, 17) == [Item(layer, 1), Item(layer, 2), Item(layer, 3)]
    assert memory.items_at(aux.address, 8) == [Item(aux, 0)]
    assert memory.items_at(layer.address + layer.nbytes - 1, 2) == []
    assert memory.items_at(1, 8) == []
    memory.write(Item(layer, 2), 12345)
    assert memory.read(Item(layer, 2)) == 12345
    assert memory.read(Item(layer, 1)) == POISON_TOKEN
    assert memory.items_of("aux", 1) == [Item(aux, 1)]
