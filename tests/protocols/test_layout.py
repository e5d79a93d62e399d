from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import LayoutError, RefusedError
from protocols.layout import MUST_BE_EQUAL, LayerBuffer, Layout, pair_layouts
from tests.support.layouts import PAGES, SPACING, buffer, make_layout, make_mla_layout, mha_buffers, mla_buffers

OTHER: dict[str, Any] = {
    "page_size": 8,
    "dtype": "float16",
    "contract": "engine 2",
    "num_layers": 5,
    "kv_heads": 4,
    "head_dim": 16,
    "page_order": "HND",
    "group_order": "block",
}


def changed(layout: Layout, **fields: Any) -> Layout:
    """As ``msgspec.structs.replace``, but checked again."""
    return Layout(**{name: getattr(layout, name) for name in layout.__struct_fields__} | fields)


def refused(source: Layout, target: Layout) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        pair_layouts(source, target)
    return caught.value


def names(source: Layout, target: Layout) -> list[tuple[str, int, int]]:
    return [(pair.src.name, pair.src.id, pair.dst.id) for pair in pair_layouts(source, target)]


# What fits.


@pytest.mark.row("A15")
@pytest.mark.parametrize("make", [make_layout, make_mla_layout])
def test_equal_layouts_pair_every_buffer(make: Any) -> None:
    pairs = pair_layouts(make(), make())
    assert [(pair.src, pair.dst) for pair in pairs] == [(each, each) for each in make().buffers]


@pytest.mark.row("E7")
@given(st.permutations(mha_buffers()), st.permutations(mha_buffers()), st.permutations(range(9)))
def test_buffers_pair_by_kind_and_layer_in_whatever_order(
    ours: list[LayerBuffer], theirs: list[LayerBuffer], ids: list[int]
) -> None:
    renamed = [msgspec.structs.replace(each, id=id) for each, id in zip(theirs, ids, strict=True)]
    pairs = pair_layouts(make_layout(buffers=tuple(ours)), make_layout(buffers=tuple(renamed)))
    assert [pair.src for pair in pairs] == ours, "in the source's order"
    for pair in pairs:
        assert (pair.src.kind, pair.src.layer) == (pair.dst.kind, pair.dst.layer)
        assert pair.src.address == pair.dst.address, "the same buffer, under another id"
    assert len({pair.dst.id for pair in pairs}) == len(ours)


@pytest.mark.row("E7")
def test_each_prefill_stage_addresses_the_slice_it_owns() -> None:
    decode = make_layout(buffers=mha_buffers(range(4)))
    seen: list[str] = []
    for stage in range(2):
        layers = range(2 * stage, 2 * stage + 2)
        prefill = make_layout(buffers=mha_buffers(layers)[:-1], pp_rank=stage, pp_size=2)
        pairs = pair_layouts(prefill, decode)
        assert {pair.src.layer for pair in pairs} == set(layers)
        assert all(pair.dst == pair.src for pair in pairs)
        seen += [pair.dst.name for pair in pairs]
    assert sorted(seen) == sorted(each.name for each in decode.buffers if each.unit == "page")


@pytest.mark.row("E7")
def test_stages_on_both_sides_pair_rank_by_rank() -> None:
    stages = [make_layout(buffers=mha_buffers(range(2 * nth, 2 * nth + 2)), pp_rank=nth, pp_size=2) for nth in range(2)]
    for stage in stages:
        assert len(pair_layouts(stage, stage)) == 5
    error = refused(stages[0], stages[1])
    assert (error.data["prefill"], error.data["decode"]) == ("0/2", "1/2")


@pytest.mark.row("E7")
@pytest.mark.parametrize("source_stages, target_stages", [(1, 2), (2, 4), (4, 2), (3, 2)])
def test_other_numbers_of_stages_are_refused(source_stages: int, target_stages: int) -> None:
    error = refused(make_layout(pp_size=source_stages), make_layout(pp_size=target_stages))
    assert "pipeline" in error.what
    assert (error.data["prefill"], error.data["decode"]) == (f"0/{source_stages}", f"0/{target_stages}")


@pytest.mark.row("E7")
def test_a_stage_of_the_decode_that_lists_more_is_refused() -> None:
    """Stage pairs with the same stage: what the decode has more would never be written."""
    prefill = make_layout(buffers=mha_buffers(range(1)), pp_rank=0, pp_size=2)
    decode = make_layout(buffers=mha_buffers(range(2)), pp_rank=0, pp_size=2)
    error = refused(prefill, decode)
    assert error.data["k[1]"] == "only on the decode"
    assert error.data["v[1]"] == "only on the decode"


@pytest.mark.parametrize("tp", [(0, 1, 0, 1), (0, 1, 3, 4), (3, 4, 0, 1), (1, 2, 5, 8), (1, 2, 0, 2)])
def test_replicated_mla_takes_any_tensor_parallel_rank(tp: tuple[int, int, int, int]) -> None:
    source = make_mla_layout(tp_rank=tp[0], tp_size=tp[1])
    target = make_mla_layout(tp_rank=tp[2], tp_size=tp[3])
    assert len(pair_layouts(source, target)) == 4


@pytest.mark.parametrize("tp", [(0, 1, 0, 2), (0, 2, 0, 1), (0, 2, 1, 2), (0, 2, 0, 4)])
def test_heads_split_otherwise_are_refused_with_the_reason(tp: tuple[int, int, int, int]) -> None:
    source = make_layout(tp_rank=tp[0], tp_size=tp[1])
    target = make_layout(tp_rank=tp[2], tp_size=tp[3])
    error = refused(source, target)
    assert "head slicing" in error.what
    assert (error.data["prefill"], error.data["decode"]) == (f"{tp[0]}/{tp[1]}", f"{tp[2]}/{tp[3]}")
    assert len(pair_layouts(source, source)) == 9


@pytest.mark.parametrize("kind", ["k", "v", "draft_k", "draft_v"])
def test_heads_beside_mla_are_still_split(kind: str) -> None:
    """A draft model with heads next to an MLA model: equal item lengths do not make them the same heads."""
    buffers = (*mla_buffers(), buffer(50, kind, 4, hooked=False))
    source = make_mla_layout(buffers=buffers, tp_rank=0, tp_size=2)
    for rank, size in ((1, 2), (1, 4)):
        assert "head slicing" in refused(source, make_mla_layout(buffers=buffers, tp_rank=rank, tp_size=size)).what
    assert len(pair_layouts(source, source)) == 5


@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_prefill_ranks_fit(mode: Any, rank: int) -> None:
    assert len(pair_layouts(make_layout(cp_mode=mode, cp_rank=rank, cp_size=2), make_layout())) == 9


def test_interleaved_context_parallelism_is_refused() -> None:
    error = refused(make_layout(cp_mode="interleaved", cp_size=2), make_layout())
    assert "below page grain" in error.what
    assert error.data["cp_mode"] == "interleaved"


def test_a_context_parallel_decode_is_refused() -> None:
    error = refused(make_layout(), make_layout(cp_mode="zigzag", cp_size=2))
    assert error.data["cp_size"] == 2


def test_data_parallel_ranks_are_free() -> None:
    assert len(pair_layouts(make_layout(dp_rank=1, dp_size=2), make_layout(dp_rank=3, dp_size=8))) == 9


def test_scratch_stays_at_home() -> None:
    scratch = buffer(70, "scratch", 0, item_len=1, items=8)
    with_scratch = make_layout(buffers=(*mha_buffers(), scratch))
    for source, target in ((with_scratch, make_layout()), (make_layout(), with_scratch), (with_scratch, with_scratch)):
        assert all(pair.src.kind != "scratch" for pair in pair_layouts(source, target))


# What does not.


@pytest.mark.row("E3")
@pytest.mark.parametrize("field", MUST_BE_EQUAL)
def test_each_field_that_differs_is_named_with_both_values(field: str) -> None:
    ours, theirs = make_layout(), make_layout(**{field: OTHER[field]})
    error = refused(ours, theirs)
    assert dict(error.data) == {field: f"{getattr(ours, field)!r} != {getattr(theirs, field)!r}"}
    assert field in str(error)
    assert ours.fingerprint != theirs.fingerprint


@pytest.mark.row("E3")
def test_all_fields_that_differ_are_named_at_once() -> None:
    error = refused(make_layout(), make_layout(**OTHER))
    assert tuple(error.data) == MUST_BE_EQUAL
    assert set(OTHER) == set(MUST_BE_EQUAL)


@pytest.mark.row("E3")
def test_the_fingerprint_is_of_the_model_not_of_the_rank() -> None:
    ranks = [
        make_layout(),
        make_layout(tp_rank=1, tp_size=2),
        make_layout(pp_rank=1, pp_size=2, buffers=mha_buffers(range(2, 4))),
        make_layout(cp_rank=1, cp_size=2, cp_mode="zigzag"),
        make_layout(dp_rank=1, dp_size=2),
    ]
    assert len({layout.fingerprint for layout in ranks}) == 1
    assert len(make_layout().fingerprint) == 32


@pytest.mark.row("E3")
def test_buffers_that_differ_are_named() -> None:
    first, *others = mha_buffers()
    wider = msgspec.structs.replace(first, item_len=1024, nbytes=1024 * PAGES)
    error = refused(make_layout(), make_layout(buffers=(wider, *others)))
    assert dict(error.data) == {"buffers": 1, "k[0]": "item_len 512 != 1024"}
    error = refused(make_layout(), make_layout(buffers=tuple(others)))
    assert dict(error.data) == {"buffers": 1, "k[0]": "only on the prefill"}
    error = refused(make_layout(buffers=tuple(others)), make_layout())
    assert dict(error.data) == {"buffers": 1, "k[0]": "only on the decode"}


@pytest.mark.row("E3")
def test_an_aux_or_state_buffer_of_the_prefill_needs_its_twin() -> None:
    state = buffer(80, "state", 0, item_len=32, items=4)
    error = refused(make_layout(buffers=(*mha_buffers(), state)), make_layout())
    assert dict(error.data) == {"buffers": 1, "state[0]": "only on the prefill"}


@pytest.mark.row("E3")
def test_many_differences_stay_a_short_text() -> None:
    error = refused(
        make_layout(buffers=mha_buffers(range(40)), num_layers=80),
        make_layout(buffers=mha_buffers(range(40, 80)), num_layers=80),
    )
    assert error.data["buffers"] == 160
    assert len(error.data) == 9
    assert len(str(error)) < 500


# What a layout must not say of itself.


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp"])
def test_a_rank_lies_below_its_size(axis: str) -> None:
    with pytest.raises(LayoutError, match=f"{axis}_rank"):
        make_layout(**{f"{axis}_rank": 2, f"{axis}_size": 2, "cp_mode": "zigzag" if axis == "cp" else "none"})


@pytest.mark.parametrize("mode, size", [("none", 2), ("zigzag", 1), ("contiguous", 1)])
def test_a_split_needs_a_mode_and_a_mode_ranks(mode: Any, size: int) -> None:
    with pytest.raises(LayoutError, match="cp_mode"):
        make_layout(cp_mode=mode, cp_size=size)


@pytest.mark.parametrize(
    "extra, text",
    [
        (buffer(0, "mla", 9), "one id"),
        (buffer(99, "k", 0), "one kind and layer"),
        (LayerBuffer(id=99, kind="x", layer=0, address=0, nbytes=513, item_len=512), "whole number of items"),
        (LayerBuffer(id=99, kind="x", layer=0, address=2**63 - 512 * 32, nbytes=512 * 32, item_len=512), "63 bits"),
        (LayerBuffer(id=99, kind="x", layer=0, address=0, nbytes=500 * 32, item_len=500), "whole number of tokens"),
        (buffer(99, "x", 0, items=PAGES + 1), "one index space"),
    ],
)
def test_buffers_that_contradict_each_other(extra: LayerBuffer, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make_layout(buffers=(*mha_buffers(), extra))


def test_aux_state_and_scratch_need_no_whole_tokens_and_share_no_index_space() -> None:
    layout = make_layout(
        buffers=(
            *mha_buffers(),
            buffer(60, "aux", 1, item_len=24, items=3),
            buffer(61, "state", 0, item_len=7, items=5),
            buffer(62, "state", 1, item_len=9, items=4),
            buffer(63, "scratch", 0, item_len=1, items=1),
        )
    )
    assert layout.num_pages == PAGES
    assert [layout.units_of(unit) for unit in ("page", "aux", "state", "scratch")] == [PAGES, 3, 4, 1]
    assert [each.id for each in layout.unit_buffers("state")] == [61, 62]
    assert make_layout(buffers=()).num_pages == 0
    assert make_layout(buffers=()).units_of("page") == 0


@pytest.mark.parametrize(
    "kind, unit",
    [("k", "page"), ("mla", "page"), ("draft_k", "page"), ("aux", "aux"), ("state", "state"), ("scratch", "scratch")],
)
def test_units_of_kinds(kind: str, unit: str) -> None:
    each = buffer(3, kind, 2, item_len=16, items=4)
    assert (each.unit, each.items, each.name) == (unit, 4, f"{kind}[2]")
    assert each.address == 4 * SPACING
    assert each.hooked


def test_mla_is_told_by_its_kind() -> None:
    assert make_mla_layout().is_mla
    assert not make_layout().is_mla


def test_changed_checks_again() -> None:
    with pytest.raises(LayoutError):
        changed(make_layout(), tp_rank=1)
