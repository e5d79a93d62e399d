from typing import Any

import msgspec
import msgspec.inspect as mi
import pytest

from protocols import messages
from protocols.messages import MAX_COVERAGE, MAX_DESTINATIONS, MAX_FRAME_BYTES, UNSEQUENCED, Message
from tests.support.messages import MESSAGE_TYPES

ENVELOPE = ("v", "src", "dst", "seq", "ack")


def info(cls: type[msgspec.Struct]) -> mi.StructType:
    kind = mi.type_info(cls)
    assert isinstance(kind, mi.StructType)
    return kind


def test_every_message_of_the_module_is_one_that_decodes() -> None:
    defined = {each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, Message)}
    assert defined - {Message} == set(MESSAGE_TYPES)


def test_tags_are_unique_and_named_like_their_class() -> None:
    tags = {cls.__name__: info(cls).tag for cls in MESSAGE_TYPES}
    assert len(set(tags.values())) == len(MESSAGE_TYPES)
    for name, tag in tags.items():
        assert str(tag).replace("_", "") == name.lower()
    assert {info(cls).tag_field for cls in MESSAGE_TYPES} == {"type"}


@pytest.mark.parametrize("cls", MESSAGE_TYPES)
def test_messages_are_frozen_maps_that_ignore_unknown_fields(cls: type[msgspec.Struct]) -> None:
    config = cls.__struct_config__
    assert config.frozen
    assert not config.array_like
    assert not config.forbid_unknown_fields
    assert set(ENVELOPE) <= set(cls.__struct_fields__)


def test_the_messages_of_the_protocol() -> None:
    assert [cls.__name__ for cls in MESSAGE_TYPES] == [
        "Hello",
        "Welcome",
        "Refused",
        "WrongIncarnation",
        "Ping",
        "Pong",
        "Offer",
        "Done",
        "Committed",
        "Abort",
        "AbortAck",
        "Rollover",
        "RolloverAck",
        "Bye",
    ]
    assert [cls.__name__ for cls in UNSEQUENCED] == ["Hello", "Welcome", "Refused", "WrongIncarnation", "Ping", "Pong"]


def unbounded(kind: mi.Type, at: str) -> list[str]:
    """Where a type lets a peer send more than one frame could justify: no upper bound of a count, no lower of a
    number."""
    found: list[str] = []
    match kind:
        case mi.IntType() if at.rpartition(".")[2] not in ("v", "chosen", "v_min", "v_max"):
            found += [at] if kind.ge is None or kind.ge < 0 else []
        case mi.StrType() | mi.BytesType():
            found += [at] if kind.max_length is None else []
        case mi.UnionType():
            found += [each for inner in kind.types for each in unbounded(inner, at)]
        case mi.TupleType():
            found += [each for inner in kind.item_types for each in unbounded(inner, at)]
        case mi.VarTupleType():
            found += unbounded(kind.item_type, at)
        case mi.StructType():
            found += [each for field in kind.fields for each in unbounded(field.type, f"{at}.{field.name}")]
    return found


@pytest.mark.row("C7")
@pytest.mark.parametrize("cls", MESSAGE_TYPES)
def test_numbers_texts_and_byte_strings_are_bounded_in_the_type(cls: type[msgspec.Struct]) -> None:
    assert unbounded(info(cls), cls.__name__) == []


@pytest.mark.parametrize(
    "name, fields",
    [
        ("Ping", {"number"}),
        ("Pong", {"number"}),
        ("WrongIncarnation", {"meant"}),
        ("Refused", {"reason"}),
        ("Welcome", {"chosen"}),
        ("Hello", {"role", "fingerprint", "layout", "engine", "engine_version", "transport", "session"}),
        ("Offer", {"room", "gen", "session", "pages", "prefix_tokens", "total_tokens"}),
        ("Done", {"room", "gen", "status"}),
        ("Committed", {"room", "gen", "status"}),
        ("Abort", {"room", "gen", "origin", "reason"}),
        ("AbortAck", {"room", "gen", "session"}),
        ("Rollover", {"old_session", "session", "layout", "deadline_ms"}),
        ("RolloverAck", {"session"}),
        ("Bye", set()),
    ],
)
def test_only_these_fields_are_required_for_good(name: str, fields: set[str]) -> None:
    """A field added later must have a default, or an older peer's message would not decode."""
    cls: Any = getattr(messages, name)
    assert {field.name for field in info(cls).fields if field.required} == fields


def test_limits() -> None:
    assert MAX_FRAME_BYTES == 16 * 1024 * 1024
    assert (MAX_DESTINATIONS, MAX_COVERAGE) == (1024, 65536)
