"""The real engine: Mooncake's Transfer Engine, driven from one loop without ever blocking it.

Only asynchronous writes and status questions are used. This module owns the native engine's life: making it, first
contact, memory, and its end; how completion is learnt is in ``mooncake_completion``. Native result codes become this
package's words here and in the modules named ``mooncake_*``, and travel no further.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Any, Literal

import numpy as np

from orchestrator.engines import mooncake_abi, mooncake_env
from orchestrator.engines.admission import Regions, admit
from orchestrator.engines.base import Batch, EngineInfo, EngineLimits, Probe
from orchestrator.engines.daemon import in_daemon_thread
from orchestrator.engines.draining import POLL_INTERVAL, drain, poll_guarded
from orchestrator.engines.mooncake_abi import Abi
from orchestrator.engines.mooncake_completion import BatchStatus, Completion, OneBlock
from orchestrator.engines.mooncake_contact import FirstContacts
from orchestrator.engines.ports import listening_ports
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ClosedError, ConfigError, EngineUnavailableError
from protocols.ids import Session

log = logging.getLogger(__name__)

CompletionMode = Literal["auto", "one-block", "batch-status"]

WIDEST = 512
"""Most blocks in flight to one peer, where a stopped one is drained fast enough: more made nothing faster."""
NOWHERE = 1
"""An address that no process has memory at: a peer refuses to write there, whoever it is."""

MEMORY_ERRORS = {
    -3: "no such region is registered",
    -7: "the region overlaps one already registered",
}


class MooncakeEngine:
    """An engine on ``host``, reachable there through a port it picks itself.

    ``completion``: ``one-block`` asks for every block and needs nothing but the plain API; ``batch-status`` asks for
    whole batches through symbols the library exports, if this machine's wheel passes the self-test, and falls back to
    one-block, with a warning, if not; ``auto`` does so without one. ``info.completion_mode`` says what it became.

    Making one blocks: a second or two where the self-test never ran, about a millisecond otherwise. Make the first
    before the loop is busy, or call ``mooncake_abi.trusted()`` in a thread before.

    Raises ConfigError for a refused environment, EngineUnavailableError for what is missing, too old or does not start.
    Never fork a process with a living engine: its threads are not in the child.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        completion: CompletionMode = "auto",
        limits: EngineLimits | None = None,
        *,
        transport: str = "tcp",
        devices: str = "",
    ) -> None:
        module = mooncake_env.load()
        features = mooncake_abi.trusted()
        native = module.TransferEngine()
        before = listening_ports()
        code = native.initialize(host, "P2PHANDSHAKE", transport, devices)
        if code != 0:
            raise EngineUnavailableError("mooncake could not start", host=host, transport=transport, code=code)
        bound = mooncake_env.drain_bound(os.environ)
        window = min(WIDEST, bound)
        self.limits = limits or EngineLimits(max_batch_blocks=window, window_blocks=window, max_window_blocks=window)
        self.session = Session(f"{host}:{native.get_rpc_port()}")
        self.ports = tuple(sorted(listening_ports() - before))
        self._native: Any = native
        self._abi = Abi(str(module.__file__), native.get_engine_ptr())
        self._features = features
        self._completion = self._choose(completion)
        self._regions = Regions()
        self._connected: set[Session] = set()
        self._first_contacts = FirstContacts(host, native, self._abi_for(mooncake_abi.OPEN_SEGMENT))
        self._contacts: dict[Session, asyncio.Future[str]] = {}
        self._closing: asyncio.Task[None] | None = None
        self.info = EngineInfo("mooncake", mooncake_env.installed_version(), transport, self._completion.mode)

    def _choose(self, wish: CompletionMode) -> Completion[Any]:
        if wish != "one-block":
            abi = self._abi_for(mooncake_abi.BATCH_STATUS)
            if abi is not None:
                return BatchStatus(self._native.batch_transfer_async_write, abi)
        if wish == "batch-status":
            log.warning("mooncake's batch status may not be used on this machine; asking for every block instead")
        return OneBlock(self._native.transfer_submit_write, self._native.transfer_check_status)

    def _abi_for(self, feature: str) -> Abi | None:
        return self._abi if feature in self._features else None

    @property
    def pending(self) -> int:
        return self._completion.pending

    def register(self, address: int, nbytes: int) -> None:
        self._check_open()
        self._regions.add(address, nbytes)
        code = self._native.register_memory(address, nbytes)
        if code != 0:
            self._regions.remove(address)
            raise memory_error("register", code, address=address, nbytes=nbytes)

    def unregister(self, address: int) -> None:
        self._check_open()
        self._regions.remove(address)
        code = self._native.unregister_memory(address)
        if code != 0:
            raise memory_error("unregister", code, address=address)

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        """First contact: a sign of life, the segment opened, then the probe byte written and awaited.

        Calls for one session share one contact, also a later call that finds an earlier one still in its thread.
        Cancelling, or the timeout, leaves that thread to end by itself, and the probe byte in flight.
        """
        self._check_open()
        if session in self._connected:
            return
        try:
            async with asyncio.timeout(timeout):
                trouble = await self._contact(session)
                if not trouble and probe is not None:
                    trouble = await self._write_probe(session, probe)
        except TimeoutError as error:
            raise BrokenPeerError("the peer did not answer in time", session=session, timeout=timeout) from error
        if trouble:
            raise BrokenPeerError(trouble, session=session)
        self._connected.add(session)

    async def _contact(self, session: Session) -> str:
        contact = self._contacts.get(session)
        if contact is None:
            call = partial(self._first_contacts.contact, session)
            contact = in_daemon_thread(call, name=f"kvferry-connect-{session}")
            self._contacts[session] = contact
            contact.add_done_callback(lambda _: self._contacts.pop(session))
        return await asyncio.shield(contact)

    async def _write_probe(self, session: Session, probe: Probe) -> str:
        self._check_open()
        blocks = Blocks(np.array([probe.src]), np.array([probe.dst]), np.array([1]))
        batch = self._completion.submit(session, blocks, admit(blocks, self.limits, self._regions))
        while not batch.done:
            await asyncio.sleep(POLL_INTERVAL)
            poll_guarded(self)
        return "" if batch.landed else "the peer refused the probe"

    async def disconnect(self, session: Session) -> None:
        """As the contract says. The library keeps the idle connections to an ended peer until each is used again, so
        each is: by a byte for an address that no peer can have registered."""
        if session not in self._connected:
            return
        self._connected.discard(session)
        source = self._regions.first()
        if self._closing is not None or source is None or self.info.transport != "tcp":
            return
        lanes = mooncake_env.lanes(os.environ)
        ints = [source] * lanes, [NOWHERE] * lanes, [1] * lanes
        try:
            batch = self._completion.submit(session, Blocks(*(np.array(part) for part in ints)), ints)
        except BrokenPeerError:
            return
        while not batch.done:
            await asyncio.sleep(POLL_INTERVAL)
            poll_guarded(self)

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        self._check_open()
        if session not in self._connected:
            raise BrokenPeerError("this peer was never connected", session=session)
        return self._completion.submit(session, blocks, admit(blocks, self.limits, self._regions))

    def poll(self) -> int:
        return self._completion.poll()

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ClosedError("the engine is closed", session=self.session)

    async def close(self, drain_timeout: float) -> None:
        """As the contract says; cancelling leaves the end to itself, and a second call waits for the same end.

        A first contact that hangs in the opening of a segment is waited for, up to a minute; one that hangs in its
        probe is not. The GIL is released if this machine's wheel passed the self-test, else held for up to a second.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_timeout))
        await asyncio.shield(self._closing)

    async def _close(self, drain_timeout: float) -> None:
        await drain(self, drain_timeout)
        self._completion.abandon()
        last, self._native = [self._native], None
        call = partial(_delete, last, self._first_contacts, self._abi_for(mooncake_abi.FREE_ENGINE))
        await in_daemon_thread(call, name=f"kvferry-close-{self.session}")
        self._completion.finish()


def _delete(last: list[Any], contacts: FirstContacts, abi: Abi | None) -> None:
    """Delete the native engine, of which ``last`` holds the last reference."""
    contacts.shut()
    if abi is not None:
        abi.free_engine()
    last.clear()


def memory_error(action: str, code: int, **data: Any) -> ConfigError:
    """A native answer to a memory call, in words."""
    reason = MEMORY_ERRORS.get(code, "the transport does not take it")
    return ConfigError(f"mooncake could not {action} memory: {reason}", code=code, **data)
