"""The demo's processes: what they say, what happens when they break, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.demo import wire
from orchestrator.demo.fleet import ENVIRONMENT, Fleet, Worker, WorkerError
from protocols.errors import BrokenPeerError, DeadlineError

WORKER = """
import os, socket, sys, threading, time
from orchestrator.demo import wire
from orchestrator.demo.worker import Talk, serve
from protocols.errors import ConfigError

class Role:
    def handle(self, command):
        if isinstance(command, wire.Tokenize):
            talk.note("counting")
            return [[len(text)] for text in command.texts]
        if isinstance(command, wire.Connect):
            exec(command.address)

talk = Talk(socket.socket(fileno=int(sys.argv[1])))
threading.Thread(target=talk.listen, daemon=True).start()
serve(Role(), talk)
"""


@pytest.fixture
def notes() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def fleet(notes: list[tuple[str, str]]) -> Iterator[Fleet]:
    with Fleet(lambda worker, text: notes.append((worker, text))) as fleet:
        yield fleet


def start(fleet: Fleet, name: str = "worker") -> Worker:
    return fleet.start(name, "-c", WORKER)


def test_a_command_is_answered_and_notes_are_shown(fleet: Fleet, notes: list[tuple[str, str]]) -> None:
    worker = start(fleet)
    assert fleet.call(worker, wire.Tokenize(["abc", "de"]), list[list[int]], 20) == [[3], [2]]
    assert notes == [("worker", "counting")]


def test_workers_run_one_thread_offline_in_their_own_session(fleet: Fleet) -> None:
    worker = start(fleet)
    check = f"assert all(os.environ[k] == v for k, v in {ENVIRONMENT!r}.items()) and os.getsid(0) == os.getpid()"
    fleet.call(worker, wire.Connect(check), type(None), 20)


def test_a_mistake_and_a_bug_are_told_apart(fleet: Fleet) -> None:
    worker = start(fleet)
    with pytest.raises(WorkerError, match=r"^no such thing \(port=5\)\. Do this$") as caught:
        fleet.call(worker, wire.Connect("raise ConfigError('no such thing', hint='Do this', port=5)"), type(None), 20)
    assert caught.value.expected


def test_a_bug_arrives_with_its_traceback(fleet: Fleet) -> None:
    worker = start(fleet)
    with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
        fleet.call(worker, wire.Connect("1 / 0"), type(None), 20)
    assert not caught.value.expected
    assert "Traceback" in caught.value.what


def test_a_failure_of_one_worker_ends_the_wait_for_another(fleet: Fleet) -> None:
    slow, broken = start(fleet, "slow"), start(fleet, "broken")
    fleet.send(slow, wire.Connect("time.sleep(30)"))
    fleet.send(broken, wire.Connect("raise ConfigError('broken')"))
    with pytest.raises(WorkerError, match="broken"):
        fleet.result(slow, type(None), 20)


def test_a_worker_that_dies_is_named_with_its_last_words(fleet: Fleet) -> None:
    worker = start(fleet)
    fleet.send(worker, wire.Connect("print('famous', flush=True); os.kill(os.getpid(), 9)"))
    with pytest.raises(BrokenPeerError, match=r"(?s)worker process ended unexpectedly \(SIGKILL\).*famous"):
        fleet.result(worker, type(None), 20)


def test_a_worker_that_never_answers_is_given_up(fleet: Fleet) -> None:
    worker = start(fleet)
    fleet.send(worker, wire.Connect("time.sleep(30)"))
    with pytest.raises(DeadlineError, match=r"worker process did not answer within 0\.2 s"):
        fleet.result(worker, type(None), 0.2)


def test_expecting_is_waited_for(fleet: Fleet, notes: list[tuple[str, str]]) -> None:
    worker = start(fleet)
    fleet.send(worker, wire.Connect("talk.note(wire.EXPECTING)"))
    fleet.wait_expecting(20)
    fleet.result(worker, type(None), 20)
    assert notes == []


def test_leaving_ends_busy_and_stubborn_workers_within_two_seconds(fleet: Fleet) -> None:
    busy, stubborn = start(fleet), start(fleet)
    fleet.send(busy, wire.Connect("time.sleep(60)"))
    block = "import signal; signal.signal(15, signal.SIG_IGN); os._exit = lambda code: None; time.sleep(60)"
    fleet.send(stubborn, wire.Connect(f"talk.note('deaf'); {block}"))
    with pytest.raises(DeadlineError):
        fleet.result(busy, type(None), 4.0)  # time for both to have begun
    started = time.monotonic()
    fleet.close()
    assert time.monotonic() - started < 2
    assert busy.process.returncode == 0
    assert stubborn.process.returncode == -signal.SIGKILL


def test_a_retired_worker_is_gone(fleet: Fleet) -> None:
    worker = start(fleet)
    fleet.call(worker, wire.Tokenize([]), list[list[int]], 20)
    fleet.retire(worker)
    assert worker.process.returncode == 0


def test_workers_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    driver = textwrap.dedent(f"""
        import pathlib, sys, time
        from orchestrator.demo import wire
        from orchestrator.demo.fleet import Fleet
        with Fleet(print) as fleet:
            worker = fleet.start("worker", "-c", {WORKER!r})
            fleet.call(worker, wire.Tokenize([]), list[list[int]], 20)
            fleet.send(worker, wire.Connect("time.sleep(60)"))
            print(worker.process.pid, flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        pid = next(int(line) for line in lines if line.strip().isdigit())
        process.kill()
    deadline = time.monotonic() + 5
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_leaks_between_the_parent_and_the_child(fleet: Fleet) -> None:
    before = len(os.listdir("/proc/self/fd"))
    worker = start(fleet)
    fleet.call(worker, wire.Tokenize([]), list[list[int]], 20)
    fleet.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_worker_that_has_finished_does_not_end_the_wait_for_the_next(fleet: Fleet) -> None:
    first, second = start(fleet), start(fleet)
    fleet.finish(first, 20)
    assert first.process.returncode == 0
    fleet.call(second, wire.Connect("time.sleep(0.2)"), type(None), 20)
    fleet.finish(second, 20)
