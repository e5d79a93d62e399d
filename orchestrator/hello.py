"""Who this side is, as both sides say it, and why a peer is none for it."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.engines.base import Engine
from protocols.errors import RemoteError
from protocols.layout import Layout
from protocols.messages import Hello, Refused, Role


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


def refusal(error: RemoteError) -> Refused:
    """What the peer is told: the reason and both values of what differs, each cut to what a frame takes."""
    return Refused(reason=error.what[:4000], fields={name: str(value)[:500] for name, value in error.data.items()})
