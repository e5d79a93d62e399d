"""Runs the demo: starts the processes, sends every prompt every way, compares, and ends everything.

One thread. Whatever happens, leaving :func:`run` leaves no process behind.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.demo import model, wire
from orchestrator.demo.fleet import Fleet
from orchestrator.demo.options import Options
from orchestrator.demo.verdict import MODES, Case, Transfer, compare
from protocols.errors import BrokenPeerError, BusyError, ConfigError

LOCALHOST = "127.0.0.1"
PROBE_SECONDS = 3.0
CONVERT_SECONDS = 300.0
OPEN_SECONDS = 120.0
CONNECT_SECONDS = 30.0
JOB_SECONDS = 180.0
CLOSE_SECONDS = 10.0
NOTHING = type(None)

Say = Callable[[str], None]


@dataclass(slots=True)
class Results:
    """Everything a demo found out."""

    model: str = ""
    engine: str = ""
    completion_mode: str = ""
    link_gbps: float = 0.0
    cases: list[Case] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """What the decode generated, by the case's name."""

    @property
    def ok(self) -> bool:
        """Something was compared and everything was equal."""
        return any(case.transfers for case in self.cases) and all(case.equal.all for case in self.cases)


def run(options: Options, say: Say) -> Results:
    """Run the whole demo. Raises KvferryError for what a user can mend, KeyboardInterrupt on Ctrl-C."""
    _check_ports(options)
    source = model.find()
    results = Results(model=source.name, link_gbps=options.link_gbps)
    try:
        with Fleet(lambda worker, text: say(f"{worker}: {text}")) as fleet:
            if not source.cache.is_dir():
                converter = fleet.start("convert")
                fleet.call(converter, wire.Convert(), NOTHING, CONVERT_SECONDS)
                fleet.retire(converter)
            _Demo(options, fleet, say, results).run(str(source.cache))
    finally:
        model.sweep()  # what an interrupted conversion left
    return results


def _check_ports(options: Options) -> None:
    """Say at once what would otherwise be found out after the model was loaded."""
    if options.control_port:
        try:
            with socket.socket() as probe:
                probe.bind((LOCALHOST, options.control_port))
        except OSError as error:
            raise BusyError(
                f"--control-port {options.control_port} cannot be used: {error.strerror}",
                hint="Leave it out and any free port is taken",
            ) from error
    if options.prefill_address:
        host, _, port = options.prefill_address.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise BrokenPeerError(f"no prefill worker at {options.prefill_address}: {reason}") from error


class _Demo:
    def __init__(self, options: Options, fleet: Fleet, say: Say, results: Results) -> None:
        self._options = options
        self._fleet = fleet
        self._say = say
        self._results = results
        self._gen = 0

    def run(self, cache: str) -> None:
        self._open(cache)
        cases = self._cases()
        for case in cases:
            self._results.cases.append(case)
            self._run_case(case)
        texts = self._fleet.call(self._single, wire.Detokenize([self._tokens(case) for case in cases]), list[str], 10.0)
        self._results.texts = {case.name: text for case, text in zip(cases, texts, strict=True)}
        for worker in (self._decode, self._prefill):
            self._fleet.finish(worker, CLOSE_SECONDS)

    def _open(self, cache: str) -> None:
        options, fleet = self._options, self._fleet
        command = wire.Open(
            cache=cache,
            pages=options.pool_pages,
            page_size=options.page_size,
            chunk_tokens=options.chunk_tokens,
            layer_group=options.layer_group,
            link_gbps=options.link_gbps,
            control_port=options.control_port,
            inject=options.inject or "",
            warm_up=options.inject is None,
        )
        self._prefill, self._decode, self._single = (fleet.start(name) for name in ("prefill", "decode", "single"))
        workers = (self._prefill, self._decode, self._single)
        for worker in workers:
            fleet.send(worker, command)
        prefill, _, _ = (fleet.result(worker, wire.Opened, OPEN_SECONDS) for worker in workers)
        address = options.prefill_address or prefill.address
        self._say(f"decode: connecting to {address}")
        fleet.call(self._decode, wire.Connect(address), NOTHING, CONNECT_SECONDS)
        self._results.engine, self._results.completion_mode = prefill.engine, prefill.completion_mode

    def _cases(self) -> list[Case]:
        """Every prompt, and each chunked one once more behind a prefix that both sides kept, the decode less of it."""
        options = self._options
        texts = [prompt.text for prompt in options.prompts]
        tokenized = self._fleet.call(self._single, wire.Tokenize(texts), list[list[int]], 30.0)
        cases = []
        for index, (prompt, ids) in enumerate(zip(options.prompts, tokenized, strict=True)):
            wanted = len(ids) + options.max_new_tokens
            if wanted > options.pool_pages * options.page_size:
                raise ConfigError(
                    f"the prompt {prompt.name!r} is longer than the pool: {len(ids)} tokens and "
                    f"{options.max_new_tokens} new ones do not fit in {options.pool_pages * options.page_size}",
                    hint="Raise --pool-tokens",
                )
            pages = -(-len(ids) // options.page_size)
            prefix = self._floor(len(ids) // 2)
            case = Case(f"{index + 1} {prompt.name}", index, ids, pages)
            cases.append(case)
            if len(ids) > options.chunk_tokens and prefix and not options.inject:
                case.keep_prefill, case.keep_decode = prefix, self._floor(prefix // 2)
                again = Case(f"{case.name}, again", index, ids, pages, case.keep_prefill, case.keep_decode)
                cases.append(again)
        return cases

    def _floor(self, tokens: int) -> int:
        return tokens - tokens % self._options.page_size

    def _run_case(self, case: Case) -> None:
        options = self._options
        repeats = options.repeats if len(case.ids) > options.chunk_tokens and not case.prefill_prefix else 1
        modes = [mode for mode in MODES if not options.inject or mode[0] == "layerwise"]
        schedule = [mode for _ in range(repeats) for mode in modes]  # interleaved: a drift meets all modes alike
        self._say(f"{case.name}: single process")
        case.single = self._fleet.call(
            self._single,
            wire.SingleJob(
                prompt=case.prompt,
                ids=case.ids,
                prefix_tokens=case.prefill_prefix,
                keep_tokens=case.keep_prefill,
                new_tokens=options.max_new_tokens,
            ),
            wire.SingleRun,
            JOB_SECONDS,
        )
        for number, (name, mode, paced) in enumerate(schedule, 1):
            self._say(f"{case.name}: {name} ({number}/{len(schedule)})")
            if case.prefill_prefix and number < len(schedule):
                keep = case.prefill_prefix, case.decode_prefix
            else:
                keep = case.keep_prefill, case.keep_decode
            case.transfers.setdefault(name, []).append(self._transfer(case, case.single, mode, paced, keep))

    def _transfer(
        self, case: Case, single: wire.SingleRun, mode: wire.Mode, paced: bool, keep: tuple[int, int]
    ) -> Transfer:
        """Send one prompt once. ``keep``: the tokens that prefill and decode leave in their pools for a later run."""
        self._gen += 1
        room, new_tokens = case.prompt + 1, self._options.max_new_tokens
        self._fleet.send(
            self._decode,
            wire.DecodeJob(
                room=room,
                gen=self._gen,
                prompt=case.prompt,
                total_tokens=len(case.ids),
                prefix_tokens=case.decode_prefix,
                keep_tokens=keep[1],
                new_tokens=new_tokens,
            ),
        )
        self._fleet.wait_expecting(JOB_SECONDS)
        self._fleet.send(
            self._prefill,
            wire.PrefillJob(
                room=room,
                gen=self._gen,
                prompt=case.prompt,
                ids=case.ids,
                prefix_tokens=case.prefill_prefix,
                keep_tokens=keep[0],
                mode=mode,
                paced=paced,
            ),
        )
        prefill = self._fleet.result(self._prefill, wire.PrefillRun, JOB_SECONDS)
        decode = self._fleet.result(self._decode, wire.DecodeRun, JOB_SECONDS)
        return Transfer(prefill, decode, compare(single, prefill, decode))

    def _tokens(self, case: Case) -> list[int]:
        transfer = case.layerwise
        return transfer.decode.tokens if transfer else []
