"""Bugs that seeds of the simulation found, each as a scene of its own that needs no seed."""

from __future__ import annotations

import asyncio

import numpy as np

from orchestrator.chunk import ChunkSpec
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool


async def test_a_digest_of_one_page_where_the_aux_slot_is_as_long_as_a_page() -> None:
    """Seed 17: buffers of one length with like runs share an entry of the coverage, pages and aux alike."""
    shape = {"item_len": 32, "aux_len": 32, "pages": 8}
    async with Cluster(prefills=[Pool(seed=1, **shape)], decodes=[Pool(**shape)], digest=True) as cluster:
        pages = np.array([5])
        handle = cluster.decode().expect(7, 1, cluster.addresses, pages, total_tokens=3, aux_slot=2)
        cluster.forward([ChunkSpec(room=7, gen=1, pages=[3], last=True, end_token=3, aux_slot=1)])
        result = await asyncio.wait_for(handle, 10.0)
        assert result.ok, result.error
