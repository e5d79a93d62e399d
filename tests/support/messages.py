"""Hypothesis strategies for every wire message, read from the types themselves, so that a new field is drawn too."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import msgspec.inspect as mi
from hypothesis import strategies as st

from protocols.layout import Layout
from protocols.messages import AnyMessage
from tests.support.layouts import make_layout, make_mla_layout

MESSAGE_TYPES: tuple[type[AnyMessage], ...] = get_args(AnyMessage)

incarnations = st.binary(min_size=16, max_size=16).filter(lambda value: value[0] != 0)
layouts = st.sampled_from(
    [make_layout(), make_mla_layout(tp_rank=1, tp_size=4), make_layout(cp_size=2, cp_mode="zigzag", buffers=())]
)


def values_of(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of one field's type, within its bounds; sizes kept small."""
    match kind:
        case mi.IntType():
            return st.integers(-(2**63) if kind.ge is None else kind.ge, 2**64 - 1 if kind.le is None else kind.le)
        case mi.FloatType():
            return st.floats(allow_nan=False)
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 12, 12))
        case mi.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 12, 12))
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.UnionType():
            return st.one_of(*(values_of(each) for each in kind.types))
        case mi.TupleType():
            return st.tuples(*(values_of(each) for each in kind.item_types))
        case mi.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=3).map(tuple)
        case mi.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case mi.StructType():
            return structs_of(kind.cls)
        case _:
            raise NotImplementedError(f"no strategy for {kind}")


def structs_of(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    if cls is Layout:
        return layouts
    kind = mi.type_info(cls)
    assert isinstance(kind, mi.StructType)
    fields = {field.name: values_of(field.type) for field in kind.fields}
    if {"src", "dst"} <= fields.keys():
        fields |= {"src": incarnations, "dst": st.one_of(st.just(b""), incarnations)}
    return st.builds(cls, **fields)


def messages() -> st.SearchStrategy[AnyMessage]:
    return st.one_of(*(structs_of(cls) for cls in MESSAGE_TYPES))
