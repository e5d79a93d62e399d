import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engines.admission import Regions, admit
from orchestrator.engines.base import EngineLimits
from protocols.blocks import Blocks
from protocols.errors import ConfigError

spans = st.tuples(st.integers(1, 60), st.integers(1, 12))


@given(st.lists(spans, max_size=12), spans)
def test_regions_agree_with_a_set_of_bytes(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    regions = Regions()
    taken: dict[int, set[int]] = {}
    for address, nbytes in added:
        new = set(range(address, address + nbytes))
        if any(new & old for old in taken.values()):
            with pytest.raises(ConfigError):
                regions.add(address, nbytes)
        else:
            regions.add(address, nbytes)
            taken[address] = new
    address, nbytes = asked
    wanted = set(range(address, address + nbytes))
    assert regions.hold(address, nbytes) == any(wanted <= region for region in taken.values())
    for first in taken:
        regions.remove(first)
    assert not regions.hold(address, nbytes)


def test_a_region_has_bytes_and_an_address() -> None:
    for address, nbytes in ((10, 0), (10, -1), (0, 5), (-4, 5)):
        with pytest.raises(ConfigError):
            Regions().add(address, nbytes)


def test_only_a_region_start_can_be_removed() -> None:
    regions = Regions()
    regions.add(100, 10)
    for address in (99, 101, 110):
        with pytest.raises(ConfigError):
            regions.remove(address)
    regions.remove(100)
    with pytest.raises(ConfigError):
        regions.remove(100)


def test_admit_returns_plain_ints_and_checks_each_source_on_its_own() -> None:
    regions = Regions()
    regions.add(100, 10)
    regions.add(110, 10)
    blocks = Blocks(np.array([100, 112]), np.array([7, 8]), np.array([10, 8]))
    assert admit(blocks, EngineLimits(), regions) == ([100, 112], [7, 8], [10, 8])
    across = Blocks(np.array([100, 105]), np.array([7, 8]), np.array([10, 10]))
    with pytest.raises(ConfigError, match="source lies outside"):
        admit(across, EngineLimits(), regions)
