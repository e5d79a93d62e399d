"""The door from threads into the loop: accepted means processed, in the order of each thread, one wake a burst."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from orchestrator.inbox import BURST, Inbox
from protocols.errors import ClosedError
from tests.support.waiting import until

SENDERS = 6


async def test_a_burst_wakes_the_loop_once() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    seen: list[int] = []
    for number in range(1000):
        inbox.put(seen.append, number)
    assert (inbox.wakes, seen) == (1, [])
    await until(lambda: len(seen) == 1000)
    assert seen == list(range(1000))
    assert (inbox.wakes, inbox.deposits) == (1, 1000)
    inbox.put(seen.append, 1000)
    await until(lambda: len(seen) == 1001)
    assert inbox.wakes == 2, "the next burst has a wake of its own"


async def test_nothing_deposited_wakes_nobody() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    await asyncio.sleep(0)
    assert (inbox.wakes, inbox.deposits) == (0, 0)


async def test_a_long_burst_lets_the_others_have_a_turn() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    for _ in range(3 * BURST):
        inbox.put(lambda: None)
    seen: list[int] = []

    def other() -> None:
        seen.append(inbox.deposits)
        if inbox.deposits < 3 * BURST:
            asyncio.get_running_loop().call_soon(other)

    asyncio.get_running_loop().call_soon(other)
    await until(lambda: inbox.deposits == 3 * BURST)
    assert set(seen) >= {BURST, 2 * BURST}


async def test_a_deposit_that_raises_is_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(asyncio.get_running_loop())
    seen: list[int] = []

    def broken() -> None:
        raise ZeroDivisionError("a deposit's own bug")

    for callback in (lambda: seen.append(1), broken, lambda: seen.append(2)):
        inbox.put(callback)
    await until(lambda: len(seen) == 2)
    assert "a deposit's own bug" in caplog.text
    caplog.clear()


async def test_what_a_deposit_deposits_comes_behind_what_is_there() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    seen: list[str] = []

    def first() -> None:
        seen.append("first")
        inbox.put(seen.append, "third")

    inbox.put(first)
    inbox.put(seen.append, "second")
    await until(lambda: len(seen) == 3)
    assert seen == ["first", "second", "third"]


async def test_closing_processes_what_was_accepted_and_refuses_the_rest() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    seen: list[int] = []
    for number in range(2 * BURST):
        inbox.put(seen.append, number)
    inbox.close()
    assert seen == list(range(2 * BURST)), "at once, before close returns"
    with pytest.raises(ClosedError):
        inbox.put(seen.append, 99)
    inbox.close()
    await asyncio.sleep(0)
    assert len(seen) == 2 * BURST


async def test_a_deposit_of_a_deposit_is_refused_while_closing(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(asyncio.get_running_loop())
    refused: list[bool] = []

    def late() -> None:
        try:
            inbox.put(lambda: None)
        except ClosedError:
            refused.append(True)

    inbox.put(late)
    inbox.close()
    assert refused == [True]
    assert caplog.records == []


@pytest.mark.parametrize("closes_after", [0, 50, 2000])
async def test_accepted_means_processed_whoever_is_faster(closes_after: int) -> None:
    """Six threads deposit as fast as they can while the loop closes the door: each deposit was either refused or
    processed, and each thread's come in its order."""
    inbox = Inbox(asyncio.get_running_loop())
    seen: list[tuple[int, int]] = []
    accepted = [0] * SENDERS
    start = threading.Barrier(SENDERS)

    def deposit(thread: int) -> None:
        start.wait()
        while True:
            try:
                inbox.put(seen.append, (thread, accepted[thread]))
            except ClosedError:
                return
            accepted[thread] += 1

    threads = [threading.Thread(target=deposit, args=(number,)) for number in range(SENDERS)]
    for thread in threads:
        thread.start()
    await until(lambda: len(seen) >= closes_after)
    inbox.close()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert len(seen) == sum(accepted)
    for number in range(SENDERS):
        assert [nth for thread, nth in seen if thread == number] == list(range(accepted[number]))
    assert inbox.deposits == sum(accepted)


@pytest.mark.row("A10")
def test_a_loop_that_ended_without_closing_the_door_refuses_as_well() -> None:
    """It died: the forward thread hears that nobody is there, by the same word, and nothing is kept for nobody."""
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    loop.close()
    seen: list[int] = []
    put: Callable[..., None] = inbox.put
    for _ in range(2):
        with pytest.raises(ClosedError):
            put(seen.append, 1)
    inbox.close()
    assert seen == []
