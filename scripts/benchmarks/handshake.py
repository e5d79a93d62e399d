"""From the decode's Offer to the first byte that landed, with the chunk ready and waiting.

Warm: both sides know each other. Cold: the decode is a new incarnation with a new engine, so that dialling, greeting
and the engine's first contact are in the figure.
"""

from __future__ import annotations

from scripts.benchmarks.figures import Figure, bounded
from scripts.benchmarks.forward import Compute
from scripts.benchmarks.pools import Shape, requests
from scripts.benchmarks.rig import Rig, next_generation

SHAPE = Shape("mha", layers=2, item_len=16 << 10)


def run(quick: bool) -> list[Figure]:
    return measure(30, 3) if quick else measure(300, 15)


def measure(warm: int, cold: int) -> list[Figure]:
    with Rig(SHAPE, 16) as rig:
        warm_ms = [_once(rig) for _ in range(warm + 5)][5:]
        cold_ms = []
        for _ in range(cold):
            rig.renew(0)
            cold_ms.append(_once(rig))
    return [
        bounded("handshake", "warm peer", "offer to first byte", "ms", warm_ms, at_most=1.0),
        bounded("handshake", "cold peer", "offer to first byte", "ms", cold_ms),
    ]


def _once(rig: Rig) -> float:
    """Milliseconds."""
    asked = requests(1, 1, 1, scattered=False, rng=rig.rng)
    rig.refresh()
    gen = next_generation()
    rig.side.forward(asked, Compute(), gen)
    offered: list[float] = rig.decodes[0].call("expect", [rig.side.address], rig.awaited(asked, gen))
    rig.committed(asked, gen)
    spans = rig.side.result(asked[0], gen).spans
    rig.verify(asked)
    return (min(span.landed for span in spans if span.landed is not None) - offered[0]) * 1e3
