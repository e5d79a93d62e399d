"""Every bench runs at a size that proves nothing about speed: its parts fit, its bytes are verified, it ends."""

import pytest

from scripts.benchmarks import (
    abort,
    cpu,
    fairness,
    gil,
    handshake,
    hook,
    link,
    memory,
    overlap,
    peers,
    plan,
    scale,
    throughput,
)
from scripts.benchmarks.pools import Shape
from tests.bench.test_figures import check

TINY = Shape("mha", layers=4, item_len=4096)
TINY_MLA = Shape("mla", layers=3, drafts=1, item_len=4096)

pytestmark = pytest.mark.slow
real = pytest.mark.mooncake
patient = pytest.mark.timeout(180)


@patient
def test_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "CHUNKS", (1, 10))
    monkeypatch.setattr(hook, "POOL_CHUNKS", 10)
    check(hook.measure(passes=2))


@real
@patient
def test_overlap() -> None:
    size = overlap.Size(
        scattered=6, contiguous=6, runs=1, shares=(0.3, 1.2), batches=((1, 1), (2, 2)), shapes=(TINY, TINY_MLA)
    )
    figures = overlap.measure(size)
    check(figures)
    assert len(figures) == 2 * (2 * 2 * 2 + 1) * 3


@real
@patient
def test_throughput() -> None:
    check(throughput.measure(TINY, 8, 1, peers=1) + throughput.measure(TINY, 4, 1, peers=2))


@real
@patient
def test_cpu() -> None:
    check(cpu.measure(cpu.Size(2 << 20, 1, 0.2)))


@real
@patient
def test_gil() -> None:
    check(gil.measure(gil.Size(4, 1, TINY)))


@patient
def test_scale() -> None:
    check(scale.measure((20, 40), 10, runs=1))


@real
@patient
def test_fairness() -> None:
    check(fairness.measure(fairness.Size(pages=30_000, item_len=1024, rooms=2)))


@real
@patient
def test_abort() -> None:
    check(abort.measure(abort.Size(rooms=20, storms=1)))


@real
@patient
def test_handshake() -> None:
    check(handshake.measure(warm=2, cold=1))


@patient
def test_memory() -> None:
    check(memory.measure(500, at_most=None))


@patient
def test_plan() -> None:
    figures = plan.measure(runs=2, growth=(1_000, 2_000), slices=(2_000,))
    check(figures)


@real
@patient
def test_link() -> None:
    check(link.measure(link.Size(pages=8, learning=10, rooms=4, shape=TINY)))


@real
@patient
@pytest.mark.skipif(not peers.made(), reason="the peers' environment was not made: scripts/bench peers")
def test_peers() -> None:
    check(peers.measure(8, 1))
