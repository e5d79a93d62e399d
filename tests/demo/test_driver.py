"""The driver's plan, against workers that only pretend: who runs what, in which order, behind which prefix."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

from orchestrator.demo import driver, main, options, wire
from orchestrator.demo.driver import Results, _Demo
from orchestrator.demo.pagebook import PageBook
from protocols.errors import ConfigError
from tests.demo import samples


class PretendWorker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.answers: list[Any] = []


class PretendFleet:
    """Answers as workers would, and keeps their page books, so that a wrong prefix would be refused."""

    def __init__(self, tokens: dict[str, int], pages: int = 128) -> None:
        self.tokens = tokens
        self.commands: list[tuple[str, wire.Command]] = []
        self.books = {"prefill": PageBook(pages, 1), "decode": PageBook(pages, 2)}
        self.page_size = 16

    def start(self, name: str) -> PretendWorker:
        return PretendWorker(name)

    def send(self, worker: PretendWorker, command: wire.Command) -> None:
        self.commands.append((worker.name, command))
        worker.answers.append(self._answer(worker.name, command))

    def result(self, worker: PretendWorker, kind: Any, timeout: float) -> Any:
        return worker.answers.pop(0)

    def call(self, worker: PretendWorker, command: wire.Command, kind: Any, timeout: float) -> Any:
        self.send(worker, command)
        return self.result(worker, kind, timeout)

    def finish(self, worker: PretendWorker, timeout: float) -> None:
        self.call(worker, wire.Close(), None, timeout)

    def wait_expecting(self, timeout: float) -> None:
        assert self.commands[-1][0] == "decode"

    def jobs(self, kind: type[Any]) -> list[Any]:
        return [command for _, command in self.commands if isinstance(command, kind)]

    def _answer(self, name: str, command: wire.Command) -> Any:
        match command:
            case wire.Open():
                return wire.Opened(engine="mooncake", completion_mode="one-block", address=f"tcp://{name}:1")
            case wire.Tokenize():
                return [list(range(self.tokens[text])) for text in command.texts]
            case wire.Detokenize():
                return [f"{len(tokens)} tokens" for tokens in command.tokens]
            case wire.SingleJob():
                return samples.single()
            case wire.PrefillJob():
                self._pages(name, command, len(command.ids))
                return samples.prefill(gen=command.gen)
            case wire.DecodeJob():
                self._pages(name, command, command.total_tokens)
                return samples.decode()
        return None

    def _pages(self, name: str, job: wire.Job, tokens: int) -> None:
        book, size = self.books[name], self.page_size
        pages = book.begin(job.prompt, job.prefix_tokens // size, -(-tokens // size))
        book.end(job.prompt, pages, job.keep_tokens // size)


def run(arguments: list[str], **tokens: int) -> tuple[Results, PretendFleet, list[str]]:
    chosen = options.parse([*arguments, *(word for text in tokens for word in ("--prompt", text))])
    results, fleet = Results(), PretendFleet(tokens)
    said: list[str] = []
    pretend: Any = fleet
    _Demo(chosen, pretend, said.append, results).run("cache")
    return results, fleet, said


@pytest.mark.row("A16")
def test_a_short_prompt_runs_once_in_every_mode() -> None:
    results, fleet, said = run(["--quick"], hello=40)
    assert [(job.mode, job.paced) for job in fleet.jobs(wire.PrefillJob)] == [
        ("monolithic", False),
        ("layerwise", False),
        ("monolithic", True),
        ("layerwise", True),
    ]
    assert all(job.prefix_tokens == job.keep_tokens == 0 for job in fleet.jobs(wire.Job))
    assert results.ok
    assert results.texts == {"1 hello": "2 tokens"}
    assert (results.engine, results.completion_mode) == ("mooncake", "one-block")
    assert "1 hello: layerwise_paced (4/4)" in said


@pytest.mark.row("E6")
def test_a_chunked_prompt_runs_again_behind_a_prefix_of_which_the_decode_has_less() -> None:
    results, fleet, _ = run(["--quick"], story=600)
    assert [case.name for case in results.cases] == ["1 story", "1 story, again"]
    single, prefill, decode = (fleet.jobs(kind) for kind in (wire.SingleJob, wire.PrefillJob, wire.DecodeJob))
    assert [job.prefix_tokens for job in single] == [0, 288]
    assert [job.keep_tokens for job in single] == [288, 0]
    assert [job.prefix_tokens for job in prefill] == [0] * 4 + [288] * 4
    assert [job.prefix_tokens for job in decode] == [0] * 4 + [144] * 4
    assert [job.keep_tokens for job in decode] == [144] * 7 + [0]
    assert all(book.free == 128 for book in fleet.books.values()), "the last run keeps nothing"


def test_every_transfer_is_a_new_generation_and_both_sides_agree_on_it() -> None:
    _, fleet, _ = run(["--quick"], a=40, b=600)
    prefill, decode = fleet.jobs(wire.PrefillJob), fleet.jobs(wire.DecodeJob)
    keys = [(job.room, job.gen) for job in prefill]
    assert keys == [(job.room, job.gen) for job in decode]
    assert len(set(keys)) == len(keys) == 12
    assert {room for room, _ in keys} == {1, 2}


def test_the_full_demo_repeats_the_chunked_prompt_with_its_modes_interleaved() -> None:
    results, fleet, _ = run([], a=40, b=600)
    modes = [(job.mode, job.paced) for job in fleet.jobs(wire.PrefillJob)]
    assert len(modes) == 4 + 5 * 4 + 4
    assert modes[4:24] == modes[:4] * 5
    assert {len(runs) for runs in results.cases[1].transfers.values()} == {5}


def test_an_injected_run_is_one_layerwise_transfer() -> None:
    _, fleet, _ = run(["--inject", "drop-layer"], a=600, b=40)
    assert [(job.mode, job.paced) for job in fleet.jobs(wire.PrefillJob)] == [("layerwise", False)]
    assert all(command.inject == "drop-layer" for command in fleet.jobs(wire.Open))


def test_the_decode_dials_the_prefill_or_what_it_is_told() -> None:
    _, fleet, _ = run(["--quick"], a=40)
    assert [command.address for command in fleet.jobs(wire.Connect)] == ["tcp://prefill:1"]
    _, fleet, _ = run(["--quick", "--prefill-address", "tcp://127.0.0.1:9"], a=40)
    assert [command.address for command in fleet.jobs(wire.Connect)] == ["tcp://127.0.0.1:9"]


def test_a_prompt_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the pool: 2040 tokens and 16 new ones do not fit in 2048"):
        run(["--quick"], a=2040)


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line the demo prints for a mistake it sees before it starts a process."""
    assert main.run(["--quick", *arguments]) == main.MISTAKE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"--control-port {port} cannot be used: Address already in use" in mistake(
            capsys, "--control-port", str(port)
        )


def test_a_peer_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    assert f"no prefill worker at {address}: Connection refused" in mistake(capsys, "--prefill-address", address)


def test_a_host_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no prefill worker at tcp://nowhere.invalid:5" in mistake(
        capsys, "--prefill-address", "tcp://nowhere.invalid:5"
    )


def test_a_wrong_page_makes_the_whole_demo_unequal() -> None:
    chosen = options.parse(["--quick", "--prompt", "a"])
    fleet, results = PretendFleet({"a": 40}), Results()
    answer = fleet._answer

    def corrupt(name: str, command: wire.Command) -> Any:
        value = answer(name, command)
        if isinstance(command, wire.DecodeJob) and command.gen == 2:
            return msgspec.structs.replace(value, pages=value.pages | {"k[0]": ["x"] * 4})
        return value

    fleet._answer = corrupt  # type: ignore[method-assign]
    pretend: Any = fleet
    _Demo(chosen, pretend, lambda text: None, results).run("cache")
    assert not results.ok
    assert [case.equal.pages for case in results.cases] == [False]
    assert driver.Results().ok is False
