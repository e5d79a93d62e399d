import asyncio
import threading

import pytest

from orchestrator.engines.daemon import in_daemon_thread


async def test_the_result_comes_back_from_a_named_daemon_thread() -> None:
    thread = await in_daemon_thread(threading.current_thread, name="its-name")
    assert thread.daemon
    assert thread.name == "its-name"


@pytest.mark.parametrize("error", [LookupError("from the thread"), SystemExit(3)])
async def test_whatever_is_raised_is_raised_where_it_is_awaited(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await in_daemon_thread(fail, name="failing")


async def test_cancelling_drops_the_result_only() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> int:
        gate.wait(10)
        ended.set()
        return 1

    future = in_daemon_thread(work, name="working")
    future.cancel()
    gate.set()
    async with asyncio.timeout(10):
        await asyncio.to_thread(ended.wait)
        await in_daemon_thread(lambda: None, name="after")  # its result passes the loop behind the dropped one
    assert future.cancelled()
