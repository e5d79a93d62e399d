"""The demo's worker processes: started, asked, listened to, and ended together, whatever happens.

A worker ends when its socket closes, so nothing outlives the driver even if that is killed. Workers run in sessions of
their own: Ctrl-C reaches the driver alone, which ends them. All methods belong to the driver's one thread.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Self, TypeVar

import msgspec

from orchestrator.demo import wire
from protocols.errors import BrokenPeerError, DeadlineError, KvferryError

ENVIRONMENT = {
    # Two busy processes on two cores: one thread each, and no spinning barriers.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
END_SECONDS = 0.5
"""How long a worker may take to end by itself; then it is killed. Two such waits stay within two seconds."""
LOG_LINES = 12

T = TypeVar("T")


class WorkerError(KvferryError):
    """A worker answered with a clear message (``expected``) or with the traceback of a bug."""

    def __init__(self, text: str, *, expected: bool) -> None:
        self.expected = expected
        super().__init__(text)


class Worker:
    """One process, its socket and its log (what it and its libraries print; shown only when it breaks)."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.log: IO[bytes] = tempfile.TemporaryFile()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *arguments, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
        self.answers: list[wire.Done | wire.Failed] = []
        self._buffer = b""

    def read(self) -> list[wire.Note]:
        """Take what has arrived: answers are kept, notes returned. Raises BrokenPeerError when the process is gone."""
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise BrokenPeerError(f"the {self.name} process ended unexpectedly{self._last_words()}")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [wire.decode_answer(line) for line in lines]
        self.answers += [message for message in messages if not isinstance(message, wire.Note)]
        return [message for message in messages if isinstance(message, wire.Note)]

    def _last_words(self) -> str:
        code = self.process.wait(timeout=END_SECONDS)
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return "\n  ".join([f" ({reason})", *lines])


class Fleet:
    """The workers of one demo run. A context manager: leaving it ends them all."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        """``say(worker, text)`` is called with every note but ``expecting``."""
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self.expecting = False

    def start(self, name: str, *arguments: str) -> Worker:
        """Start ``python ARGUMENTS… FD``, by default this package's worker in the role ``name``."""
        worker = Worker(name, arguments or ("-m", "orchestrator.demo.worker", name))
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return worker

    def send(self, worker: Worker, command: wire.Command) -> None:
        """Ask for something; :meth:`result` takes the answer."""
        try:
            worker.socket.sendall(wire.line(command))
        except OSError:
            worker.read()

    def result(self, worker: Worker, kind: type[T], timeout: float) -> T:
        """The oldest answer not taken yet, waited for at most ``timeout`` seconds.

        Raises WorkerError if this or any other worker failed meanwhile, BrokenPeerError if one ended, DeadlineError.
        """
        self._listen(lambda: bool(worker.answers), timeout, f"the {worker.name} process")
        answer = worker.answers.pop(0)
        assert isinstance(answer, wire.Done), "a failure was raised while listening"
        return msgspec.json.decode(answer.value, type=kind)

    def call(self, worker: Worker, command: wire.Command, kind: type[T], timeout: float) -> T:
        """Ask and wait."""
        self.send(worker, command)
        return self.result(worker, kind, timeout)

    def wait_expecting(self, timeout: float) -> None:
        """Wait until the decode has registered the room it was asked to receive."""
        self._listen(lambda: self.expecting, timeout, "the decode process")
        self.expecting = False

    def _listen(self, ready: Callable[[], bool], timeout: float, whom: str) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{whom} did not answer within {timeout:g} s")
            for key, _ in self._selector.select(left):
                worker: Worker = key.data
                for note in worker.read():
                    if note.text == wire.EXPECTING:
                        self.expecting = True
                    else:
                        self._say(worker.name, note.text)
                for answer in worker.answers:
                    if isinstance(answer, wire.Failed):
                        raise WorkerError(answer.text, expected=answer.expected)

    def finish(self, worker: Worker, timeout: float) -> None:
        """Let one worker close everything in order and end. Raises like `result`."""
        self.call(worker, wire.Close(), type(None), timeout)
        self.retire(worker)  # now: its end is no surprise to whoever waits for the next

    def retire(self, worker: Worker) -> None:
        """Let one worker end by itself."""
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        worker.socket.close()
        _end([worker])

    def close(self) -> None:
        """End every worker: closed sockets ask them to, then the kernel does. At most about a second."""
        for worker in self._workers:
            worker.socket.close()
        _end(self._workers)
        self._workers.clear()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(workers: Sequence[Worker]) -> None:
    deadline = time.monotonic() + END_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
    for worker in workers:
        worker.process.wait()
        worker.log.close()
