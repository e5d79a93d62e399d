"""One worker process of the demo: ``python -m orchestrator.demo.worker ROLE FD``.

The main thread carries out one command after the other and runs every forward; a second thread reads the socket, so
that the process ends at once when the driver is gone, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
from typing import Any, Protocol

import msgspec

from orchestrator.demo import model, wire
from protocols.errors import KvferryError


class Talk:
    """The worker's end of the socket."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self.commands: queue.SimpleQueue[wire.AnyCommand] = queue.SimpleQueue()

    def listen(self) -> None:
        """Reader thread: queue commands until the driver closes its end, then end this process."""
        try:
            for line in self._socket.makefile("rb"):
                self.commands.put(wire.decode_command(line))
        finally:
            os._exit(0)

    def note(self, text: str) -> None:
        """Tell the driver what is going on."""
        self.send(wire.Note(text))

    def send(self, answer: wire.Note | wire.Done | wire.Failed) -> None:
        self._socket.sendall(wire.line(answer))


class Role(Protocol):
    """What a process does with its commands."""

    def handle(self, command: wire.AnyCommand) -> Any:
        """Carry one out and return its answer. A KvferryError is shown to the user, anything else is a bug."""


class Converter:
    """Makes the model's fast copy, then ends: the conversion needs a gigabyte that nobody else should carry."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def handle(self, command: wire.AnyCommand) -> None:
        assert isinstance(command, wire.Convert)
        model.convert(model.find(), self._talk.note)


def make(role: str, talk: Talk) -> Role:
    """The role's object. Imports only here: each process loads what its role needs."""
    if role == "convert":
        return Converter(talk)
    import torch

    torch.set_num_threads(1)
    if role == "single":
        from orchestrator.demo.single import Single

        return Single(talk)
    if role == "prefill":
        from orchestrator.demo.prefill import Prefill

        return Prefill(talk)
    from orchestrator.demo.decode import Decode

    return Decode(talk)


def serve(role: Role, talk: Talk) -> None:
    """Carry out commands until ``Close``."""
    while True:
        command = talk.commands.get()
        try:
            value = role.handle(command)
        except KvferryError as error:
            talk.send(wire.Failed(str(error), expected=True))
        except Exception:
            talk.send(wire.Failed(traceback.format_exc(), expected=False))
        else:
            talk.send(wire.Done(msgspec.Raw(wire.encode(value))))
        if isinstance(command, wire.Close):
            return


def main(role: str, fd: int) -> None:
    """Run this process until it is closed."""
    talk = Talk(socket.socket(fileno=fd))
    threading.Thread(target=talk.listen, name="demo-driver", daemon=True).start()
    serve(make(role, talk), talk)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
