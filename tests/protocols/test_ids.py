import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.ids import INCARNATION_BYTES, MAX_GENERATION, MAX_ROOM, ChunkKey, RoomKey, is_incarnation


@given(st.binary(max_size=24))
def test_an_incarnation_is_16_bytes_of_which_the_first_is_not_zero(value: bytes) -> None:
    assert is_incarnation(value) == (len(value) == 16 and not value.startswith(b"\0"))


@pytest.mark.parametrize(
    "value, good",
    [
        (b"\1" + b"\0" * 15, True),
        (b"\0" + b"\1" * 15, False),
        (b"", False),
        (b"a" * 15, False),
        (b"a" * 17, False),
    ],
)
def test_incarnations(value: bytes, good: bool) -> None:
    assert is_incarnation(value) is good
    assert INCARNATION_BYTES == 16


def test_bounds() -> None:
    assert (MAX_ROOM, MAX_GENERATION) == (2**63 - 1, 2**64 - 1)


def test_a_generation_makes_another_room() -> None:
    assert RoomKey(5, 0) != RoomKey(5, 1)
    assert len({RoomKey(5, 0), RoomKey(5, 1), RoomKey(5, 0)}) == 2


def test_a_chunk_knows_its_room() -> None:
    chunk = ChunkKey(5, 2, 128)
    assert chunk.room_key == RoomKey(5, 2)
    assert (str(chunk), str(chunk.room_key)) == ("5.2@128", "5.2")
    assert ChunkKey(5, 2, 0) != ChunkKey(5, 2, 128)
