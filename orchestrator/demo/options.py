"""The demo's command line: options, their defaults, and one clear line for each mistake."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast, get_args

from orchestrator.demo.prompts import DEFAULT, Prompt
from protocols.errors import ConfigError

Inject = Literal["drop-layer", "corrupt-page", "skip-draft"]

INJECTIONS: tuple[str, ...] = get_args(Inject)
INJECTED_TOKENS = 8
"""New tokens of an injected run: it only has to show the fault."""
MAX_POOL_TOKENS = 32768
"""1.6 GB in each of two processes."""
FULL_REPEATS = 5
"""Repetitions behind each median of the full demo."""


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the demo. Sizes are tokens, ``link_gbps`` is 10**9 bits per second."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    chunk_tokens: int
    layer_group: int
    page_size: int
    pool_tokens: int
    link_gbps: float
    quick: bool
    inject: Inject | None
    json: Path | None
    trace: Path | None
    prefill_address: str | None
    control_port: int

    @property
    def pool_pages(self) -> int:
        return -(-self.pool_tokens // self.page_size)

    @property
    def repeats(self) -> int:
        """How often the chunked prompt runs in each mode."""
        return 1 if self.quick or self.inject else FULL_REPEATS


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises instead of printing its usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"See {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """The demo's options, for ``--help`` and for :func:`parse`."""
    build = _Parser(
        prog="kvferry demo",
        description="Prefill in one process, generate in another: a real language model whose KV cache is moved layer "
        "by layer while the forward runs. Compares with a single-process run, bit by bit; exit code 0 means equal.",
    )
    add = build.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="what to ask (repeatable)")
    add("--prompt-file", action="append", default=[], metavar="FILE", help="a prompt in a UTF-8 file (repeatable)")
    add("--max-new-tokens", type=int, metavar="N", help="tokens to generate per prompt (default 32, --quick 16)")
    add("--chunk-tokens", type=int, default=256, metavar="N", help="tokens per prefill forward (default 256)")
    add("--layer-group", type=int, default=8, metavar="N", help="layers per submission (default 8)")
    add("--page-size", type=int, default=16, metavar="N", help="tokens per page (default 16)")
    add("--pool-tokens", type=int, default=2048, metavar="N", help="tokens each worker's pool holds (default 2048)")
    add("--link-gbps", type=float, default=1.0, metavar="G", help="speed of the paced link, Gb/s (default 1)")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--trace", type=Path, metavar="FILE", help="write the timeline for chrome://tracing or ui.perfetto.dev")
    add("--inject", choices=INJECTIONS, help="break the transfer on purpose; the demo must notice (exit code 1)")
    add("--quick", action="store_true", help="every mode once, no repetitions: under two minutes on two cores")
    add("--prefill-address", metavar="tcp://HOST:PORT", help="let the decode dial this address, not the prefill's own")
    add("--control-port", type=int, default=0, metavar="N", help="the prefill's control port (default: any free one)")
    return build


def parse(argv: list[str]) -> Options:
    """Read the command line. Raises ConfigError with one clear sentence; leaves through SystemExit for ``--help``."""
    given = parser().parse_args(argv)
    for name in ("chunk_tokens", "layer_group", "page_size", "pool_tokens"):
        _at_least_one(name, getattr(given, name))
    if given.pool_tokens > MAX_POOL_TOKENS:
        raise ConfigError(f"--pool-tokens must be at most {MAX_POOL_TOKENS}, not {given.pool_tokens}")
    if given.page_size > given.pool_tokens:
        raise ConfigError(f"a page of {given.page_size} tokens is larger than the pool of {given.pool_tokens}")
    if given.max_new_tokens is not None:
        _at_least_one("max_new_tokens", given.max_new_tokens)
    if not (given.link_gbps > 0 and math.isfinite(given.link_gbps)):
        raise ConfigError(f"--link-gbps must be a positive number, not {given.link_gbps:g}")
    if not 0 <= given.control_port <= 65535:
        raise ConfigError(f"--control-port must be between 0 and 65535, not {given.control_port}")
    if given.prefill_address is not None:
        _check_address(given.prefill_address)
    for name in ("json", "trace"):
        _check_writable(f"--{name}", getattr(given, name))
    prompts = [_named(text, f"--prompt {text!r}") for text in given.prompt]
    prompts += [_from_file(Path(file)) for file in given.prompt_file]
    inject = cast(Inject | None, given.inject)
    if inject:
        prompts = (prompts or list(DEFAULT))[:1]
    default_tokens = INJECTED_TOKENS if inject else 16 if given.quick else 32
    return Options(
        prompts=tuple(prompts) or DEFAULT,
        max_new_tokens=default_tokens if given.max_new_tokens is None else given.max_new_tokens,
        chunk_tokens=given.chunk_tokens,
        layer_group=given.layer_group,
        page_size=given.page_size,
        pool_tokens=given.pool_tokens,
        link_gbps=given.link_gbps,
        quick=given.quick,
        inject=inject,
        json=given.json,
        trace=given.trace,
        prefill_address=given.prefill_address,
        control_port=given.control_port,
    )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def _named(text: str, origin: str) -> Prompt:
    if not text.strip():
        raise ConfigError(f"{origin} is empty: there is nothing to prefill")
    words = " ".join(text.split())
    return Prompt(words if len(words) <= 24 else words[:23] + "…", text)


def _from_file(path: Path) -> Prompt:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {path} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"cannot read --prompt-file {path}: {error.strerror}") from error
    return _named(text, f"--prompt-file {path}")


def _check_address(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and host and port.isdigit() and 0 < int(port) <= 65535):
        raise ConfigError(f"--prefill-address must look like tcp://HOST:PORT, not {address!r}")


def _check_writable(option: str, path: Path | None) -> None:
    """Find out now, not after two minutes of work."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written")
