"""The same blocks through SGLang 0.5.23's own sender and receiver, through kvferry, and through raw engine calls.

SGLang runs in an environment of its own (``.venv-peers``, about 1.5 GB, made on the first run), on the same Mooncake
wheel, over the same pools, in two processes. Its times run from its first ``send`` to the decode's success, kvferry's
from the first hook to the commit. Eight chunks, handed over at once: one batch of all 4096 blocks is more than the
engine's default queue takes, and SGLang would fail it. Everything takes turns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orchestrator.engines.mooncake_env import READ_LATER
from scripts.benchmarks.figures import Figure, compared
from scripts.benchmarks.forward import Compute
from scripts.benchmarks.pools import MHA_64, Request, pages_needed, requests
from scripts.benchmarks.rig import Rig
from scripts.benchmarks.usage import our_cpu_s

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-peers"
STAMP = VENV / ".made-for"
PEER = "sglang==0.5.23"
NEEDED = ("torch", "numpy", "pyzmq", "requests", "aiohttp", "msgspec", "psutil", "mooncake-transfer-engine-non-cuda")
CHUNKS = 8
_rooms = itertools.count(1)


@dataclass(slots=True)
class Runs:
    """One entry a round."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def run(quick: bool) -> list[Figure]:
    prepare()
    pages, rounds = (64, 5) if quick else (128, 11)
    return measure(pages, rounds)


def prepare() -> None:
    """Make the peers' environment unless it is there."""
    if made():
        return
    print(f"making {VENV.name} with {PEER} (minutes)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    (VENV / ".gitignore").write_text("*\n")
    install = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "scripts" / "constraints.txt")]
    subprocess.run([*install, *constraints, *NEEDED, "prometheus-client"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*install, "--no-deps", PEER], check=True, stdout=subprocess.DEVNULL)
    STAMP.write_text(PEER)


def made() -> bool:
    return STAMP.exists() and STAMP.read_text() == PEER


class SglangSide:
    """`sglang_process` as a child. Ends with its standard input."""

    def __init__(self, role: str, rig: Rig, port: int, settings: dict[str, str]) -> None:
        pool = rig.source if role == "prefill" else rig.targets[0]
        place = {
            "path": pool.path,
            "buffers": rig.shape.buffers,
            "pages": pool.pages,
            "item_len": rig.shape.item_len,
            "page_size": rig.shape.page_size,
            "port": port,
        }
        script = str(Path(__file__).with_name("sglang_process.py"))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        self._process = subprocess.Popen(
            [str(VENV / "bin" / "python"), script, role, json.dumps(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean | {"MC_LOG_LEVEL": "ERROR"} | settings,
        )
        if self._read() != "null":
            raise RuntimeError(f"SGLang's {role} did not start; run {script} by hand to see why")

    def call(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read() or '{"error": "the process ended"}')
        if "error" in answer:
            raise RuntimeError(f"SGLang: {answer['error']}")
        return answer["value"]

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        with self._process:  # closes the pipes, waits
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sglang:
    """A prefill and a decode of SGLang's over a rig's pools. Context manager."""

    def __init__(self, rig: Rig, settings: dict[str, str]) -> None:
        self._rig = rig
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with contextlib.ExitStack() as stack:
            self._prefill = stack.enter_context(SglangSide("prefill", rig, port, settings))
            self._decode = stack.enter_context(SglangSide("decode", rig, port, settings))
            self._stack = stack.pop_all()

    def send(self, request: Request) -> tuple[float, float]:
        """Seconds to the decode's success, and CPU seconds of its Python threads meanwhile."""
        room = next(_rooms)
        self._prefill.call("open", room, len(request.source))
        self._decode.call("expect", room, request.target.tolist())
        self._prefill.call("ready")
        before = self._cpu()
        chunks = [part.tolist() for part in _parts(request)]
        start = self._prefill.call("send", chunks)
        end = self._decode.call("finish")
        self._prefill.call("finish")
        return end - start, self._cpu() - before

    def _cpu(self) -> float:
        return float(self._prefill.call("cpu") + self._decode.call("cpu"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _parts(request: Request) -> list[Any]:
    starts = (0, *request.cuts[:-1])
    return [request.source[start:end] for start, end in zip(starts, request.cuts, strict=True)]


def measure(pages: int, rounds: int) -> list[Figure]:
    equal = {name: value for name, value in READ_LATER.items() if name.startswith("MC_TCP")}
    figures: list[Figure] = []
    with (
        Rig(MHA_64, pages_needed(1, pages, scattered=True)) as rig,
        Sglang(rig, {}) as default,
        Sglang(rig, equal) as tuned,
    ):
        others = {"SGLang": default, "SGLang, kvferry's settings": tuned}
        for scattered in (True, False):
            (asked,) = requests(1, CHUNKS, pages, scattered=scattered, rng=rig.rng)
            found = _rounds(rig, asked, others, rounds)
            name = "scattered" if scattered else "contiguous"
            mib = pages * MHA_64.buffers * MHA_64.item_len >> 20
            figures += _figures(f"{name} 16 KiB pages, {mib} MiB in {CHUNKS} chunks", mib, found, scattered)
        (asked,) = requests(1, 1, 1, scattered=False, rng=rig.rng)
        found = _rounds(rig, asked, {"SGLang": default}, 4 * rounds)
        ours, theirs = _ms(found["kvferry"].seconds), _ms(found["SGLang"].seconds)
        figures.append(compared("peers", "one page", "send to success", "ms", ours, "SGLang", theirs))
    return figures


def _rounds(rig: Rig, asked: Request, others: dict[str, Sglang], rounds: int) -> dict[str, Runs]:
    found = {name: Runs() for name in ("kvferry", "raw", *others)}
    for number in range(rounds + 1):
        for name, runs in found.items():
            rig.refresh()
            if name == "kvferry":
                seconds, cpu = _kvferry(rig, asked)
            elif name == "raw":
                seconds, cpu = _raw(rig, asked), 0.0
            else:
                seconds, cpu = others[name].send(asked)
            rig.verify([asked])
            if number:
                runs.seconds.append(seconds)
                runs.cpu_s.append(cpu)
    return found


def _kvferry(rig: Rig, asked: Request) -> tuple[float, float]:
    main = {threading.main_thread().native_id or 0}
    before = our_cpu_s(main) + rig.decodes[0].call("cpu")
    done = rig.kvferry([asked], Compute(), count_hooks=True)
    used = our_cpu_s(main) + rig.decodes[0].call("cpu") - before
    return done.total, used + done.forward.hooks_cpu_s


def _raw(rig: Rig, asked: Request) -> float:
    blocks = rig.blocks(asked, rig.all_layers)
    start = time.perf_counter()
    rig.raw.send([(rig.where[0].session, blocks)])
    return time.perf_counter() - start


def _figures(case: str, mib: int, found: dict[str, Runs], scattered: bool) -> list[Figure]:
    rates = {name: [mib / 1024 / seconds for seconds in runs.seconds] for name, runs in found.items()}
    ours = rates.pop("kvferry")
    figures = [
        compared(
            "peers",
            case,
            f"rate, {name}",
            "GiB/s",
            ours,
            name,
            other,
            at_least=1.7 if scattered and name == "SGLang" else None,
        )
        for name, other in rates.items()
    ]
    figures.append(compared("peers", case, "raw rate", "GiB/s", rates["raw"], "SGLang", rates["SGLang"]))
    cpu = {name: _ms(runs.cpu_s) for name, runs in found.items()}
    figures.append(
        compared("peers", case, "CPU beside the engine's threads", "ms", cpu["kvferry"], "SGLang", cpu["SGLang"])
    )
    return figures


def _ms(seconds: Sequence[float]) -> list[float]:
    return [second * 1e3 for second in seconds]
