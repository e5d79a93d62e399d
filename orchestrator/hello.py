"""Who this side is, as both sides say it."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.engines.base import Engine
from protocols.layout import Layout
from protocols.messages import Hello, Role


def make_hello(layout: Layout, engine: Engine, config: Config, role: Role) -> Hello:
    """The envelope is stamped by the link."""
    info = engine.info
    return Hello(
        role=role,
        fingerprint=layout.fingerprint,
        layout=layout,
        engine=info.name,
        engine_version=info.version,
        transport=info.transport,
        session=engine.session,
        name=config.name,
    )
