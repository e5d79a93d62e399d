"""``kvferry demo``: reads the command line, runs the demo, prints, and says by the exit code whether all was equal.

0: equal. 1: something was unequal. 2: a mistake, or something missing; one clear line says what. 130: interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

from orchestrator.demo import driver, files, options, report
from orchestrator.demo.fleet import WorkerError
from orchestrator.demo.options import Options
from protocols.errors import KvferryError

EQUAL, UNEQUAL, MISTAKE, INTERRUPTED = 0, 1, 2, 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(argv: list[str]) -> int:
    """Run the demo with these arguments and return its exit code. Call it in the main thread."""
    try:
        chosen = options.parse(argv)
    except KvferryError as error:
        return _mistake(str(error))
    except SystemExit:  # --help
        return EQUAL
    with _stop_signals():
        try:
            return _run(chosen)
        except KeyboardInterrupt:
            _tell("kvferry demo: interrupted; every process has ended")
            return INTERRUPTED
        except WorkerError as error:
            _write(chosen, {"ok": False, "error": error.what})
            return _mistake(error.what if error.expected else f"a bug in kvferry's demo:\n{error.what}")
        except KvferryError as error:
            _write(chosen, {"ok": False, "error": str(error)})
            return _mistake(str(error))


def _run(chosen: Options) -> int:
    console = Console()
    with _progress() as say:
        results = driver.run(chosen, say)
    _write(chosen, files.as_json(results))
    if chosen.trace is not None:
        files.write_json(chosen.trace, files.as_trace(results))
    try:
        report.show(results, console)
        if chosen.trace is not None:
            console.print(f"timeline for chrome://tracing or ui.perfetto.dev: {chosen.trace}", highlight=False)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EQUAL if results.ok else UNEQUAL


def _write(chosen: Options, content: dict[str, Any]) -> None:
    if chosen.json is not None:
        files.write_json(chosen.json, content)


def _mistake(text: str) -> int:
    _tell(f"kvferry demo: error: {text}")
    return MISTAKE


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _progress() -> Iterator[driver.Say]:
    """Show what is going on, on stderr: one line that changes on a terminal, else a line each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _tell
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text.replace("[", r"\["))


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Turn the first stop signal into KeyboardInterrupt and ignore further ones while everything is ended."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
