"""Coverage-guided fuzzing of everything that reads a peer's bytes: scripts/fuzz.

libFuzzer, through atheris, mutates frames towards new branches of our Python. A target passes while it raises nothing
but the error it documents. What it learns stays in .build/fuzz/TARGET and is where the next run starts; an input that
breaks a target is written there too, and is replayed with --replay FILE.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / ".build" / "fuzz"
MISSING = (
    "fuzz: atheris is not installed (Linux, CPython 3.11 to 3.13): run\n  .venv/bin/python -m pip install '.[fuzz]'\n"
    "The Hypothesis tests of the same decoders need nothing: scripts/test -- tests/hostile tests/protocols"
)
SLACK_S = 120
"""After its time a target may take so long to end (seconds)."""
SLOW_S = 5
"""A single input may take so long (seconds)."""
Target = Callable[[bytes], None]


def envelope(data: bytes) -> None:
    """Of any frame: an envelope, or MalformedFrameError. What has one is a message, or MalformedFrameError."""
    from protocols.codec import decode, decode_envelope, room_named_by
    from protocols.errors import MalformedFrameError
    from protocols.messages import HEARD_BY_PREFILL

    for heard in (None, HEARD_BY_PREFILL):
        try:
            decode_envelope(data, heard)
        except MalformedFrameError:
            continue
        room_named_by(data)
    try:
        decode(data)
    except MalformedFrameError:
        pass


def message(data: bytes) -> None:
    """A message that decodes can be encoded again, and comes back as it went."""
    from protocols.codec import decode, encode
    from protocols.errors import ConfigError, MalformedFrameError

    try:
        said = decode(data)
        again = decode(encode(said))
    except (MalformedFrameError, ConfigError):  # of a size that we do not send
        return
    assert again == said or any(value != value for value in vars_of(said)), "not the same message"


def vars_of(said: object) -> list[object]:
    """Values that may be NaN, which equals nothing."""
    timing = getattr(said, "timing", {})
    return list(timing.values())


def units(data: bytes) -> None:
    """Page and row lists: indices, or MalformedFrameError; they fit the pool, or MismatchError."""
    from orchestrator.decode_room import unit_set
    from protocols.blocks import check_units
    from protocols.codec import decode, pack_indices, unpack_indices
    from protocols.errors import MalformedFrameError, MismatchError
    from protocols.messages import AbortAck, Offer

    try:
        indices = unpack_indices(data)
        assert pack_indices(indices) == data
        check_units(indices, 64, "pages")
    except (MalformedFrameError, MismatchError):
        pass
    try:
        said = decode(data)
        if isinstance(said, AbortAck):
            unit_set(said.unknown), unit_set(said.in_doubt)
        elif isinstance(said, Offer):
            check_units(unpack_indices(said.pages), 64, "pages")
            check_units(unpack_indices(said.state_rows), 0, "state rows")
    except (MalformedFrameError, MismatchError):
        pass


def layout(data: bytes) -> None:
    """A layout that decodes pairs with ours, either way round, or is refused; its regions do not wrap."""
    from protocols.codec import decode
    from protocols.errors import MalformedFrameError, RefusedError
    from protocols.layout import pair_layouts
    from protocols.messages import Hello, Rollover
    from tests.support.layouts import make_layout, make_mla_layout

    try:
        said = decode(data)
    except MalformedFrameError:
        return
    if not isinstance(said, Hello | Rollover):
        return
    theirs = said.layout
    assert len(theirs.fingerprint) == 32
    assert theirs.num_pages >= 0
    for ours in (make_layout(), make_mla_layout()):
        for source, target in ((ours, theirs), (theirs, ours)):
            try:
                pairs = pair_layouts(source, target)
            except RefusedError:
                continue
            for pair in pairs:
                assert pair.src.item_len == pair.dst.item_len
                assert pair.dst.address + pair.dst.nbytes < 2**63


def coverage(data: bytes) -> None:
    """A report is exactly what was expected, or MismatchError."""
    from protocols.codec import decode
    from protocols.coverage import Expected
    from protocols.errors import MalformedFrameError, MismatchError
    from protocols.messages import Done

    try:
        said = decode(data)
    except MalformedFrameError:
        return
    if not isinstance(said, Done):
        return
    expected = Expected({1: (64, 0, 8), 2: (64, 4, 4), 3: (32, 0, 0)})
    try:
        expected.add(said.coverage)
        expected.check()
    except MismatchError:
        return
    covered = {b: [run for e in said.coverage if b in e.buffers for run in e.runs * e.buffers.count(b)] for b in (1, 2)}
    assert sum(count for _, count in covered[1]) == 8
    assert sum(count for _, count in covered[2]) == 4


TARGETS: dict[str, Target] = {each.__name__: each for each in (envelope, message, units, layout, coverage)}


def seeds() -> list[bytes]:
    """One frame of every message, and lists to go with them."""
    from protocols.codec import encode
    from protocols.messages import (
        Abort,
        AbortAck,
        Bye,
        Committed,
        Coverage,
        Done,
        Hello,
        Message,
        Offer,
        Ping,
        Pong,
        Refused,
        Rollover,
        RolloverAck,
        Units,
        Welcome,
        WrongIncarnation,
    )
    from tests.support.layouts import make_layout, make_mla_layout

    four = b"".join(page.to_bytes(4, "little") for page in (1, 2, 3, 9))
    names = {"src": b"s" * 16, "dst": b"d" * 16}
    said: list[Message] = [
        *(
            Hello(
                role="decode",
                fingerprint=it.fingerprint,
                layout=it,
                engine="e",
                engine_version="1",
                transport="t",
                session="h:1",
            )
            for it in (make_layout(), make_mla_layout())
        ),
        Welcome(chosen=1),
        Refused(reason="r", fields={"dtype": "a != b"}),
        WrongIncarnation(meant=b"m" * 16),
        Ping(number=1),
        Pong(number=1),
        Offer(room=1, gen=1, session="h:1", pages=four, prefix_tokens=0, total_tokens=14, aux_slot=2),
        Done(
            room=1,
            gen=1,
            status="ok",
            coverage=(Coverage((1,), 0, 64, ((0, 8),)), Coverage((2,), 0, 64, ((4, 4),))),
        ),
        Committed(room=1, gen=1, status="ok"),
        Abort(room=1, gen=1, origin="decode", reason="r"),
        AbortAck(room=1, gen=1, session="h:1", unknown=Units(pages=four), in_doubt=Units(aux=(1,), state=four)),
        Rollover(old_session="h:1", session="h:2", layout=make_layout(), deadline_ms=5000),
        RolloverAck(session="h:1"),
        Bye(),
    ]
    return [
        encode(type(each)(**{name: getattr(each, name) for name in each.__struct_fields__} | names)) for each in said
    ] + [four]


EDGES: tuple[object, ...] = (
    *(0, 1, -1, 63, 64, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    *(None, True, 0.5, float("nan"), "", "page", "x" * 300, b"", b"1234", b"s" * 16, [], {}, [[0, 1]], [1, 2, 3]),
)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change one value of the message rather than one byte of the frame, which mostly ends it as a message."""
    import atheris

    rng = random.Random(seed)
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        value = None
    if not isinstance(value, dict) or rng.random() < 0.2:
        return bytes(atheris.Mutate(data, max_size))
    try:
        changed = msgspec.msgpack.encode(change(value, rng))
    except (msgspec.MsgspecError, OverflowError, RecursionError, TypeError):
        return data
    return changed if len(changed) <= max_size else data


def change(value: Any, rng: random.Random) -> Any:
    """The value with something different somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=repr))
        if rng.random() < 0.05:
            return {name: each for name, each in value.items() if name != key}
        return value | {key: change(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        what = rng.randrange(4)
        new = [] if what == 0 else [value[at], value[at]] if what == 1 else [change(value[at], rng)]
        return [*value[:at], *new, *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return max(-(2**63), min(2**64 - 1, value + rng.choice([-4, -1, 1, 4, 8, value])))
    if isinstance(value, bytes) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice([b"", rng.randbytes(1), value[at : at + 4]]) + value[at + 1 :]
    return rng.choice(EDGES)


def fuzz(name: str, seconds: int) -> None:
    """Run one target in this process, and end with it."""
    import atheris

    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["protocols", "orchestrator.decode_room"], enable_loader_override=False):
        import protocols.blocks
        import protocols.codec
        import protocols.coverage
        import protocols.layout
        import protocols.messages  # noqa: F401
    for number, frame in enumerate(seeds()):
        (folder / f"seed-{number:02}").write_bytes(frame)
    flags = [f"-max_total_time={seconds}", f"-timeout={SLOW_S}", "-rss_limit_mb=2048", "-max_len=16384"]
    flags += [f"-artifact_prefix={folder}/broken-", "-print_final_stats=1", f"-seed={random.randrange(1, 2**31)}"]
    atheris.Setup([sys.argv[0], *flags, str(folder)], TARGETS[name], custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("target", nargs="?", default="all", choices=["all", *TARGETS])
    parser.add_argument("--seconds", type=int, default=30, help="in all (default 30)")
    parser.add_argument("--replay", metavar="FILE", type=Path, help="run the target once, over this file")
    given = parser.parse_args()
    if given.replay is not None:
        for name in TARGETS if given.target == "all" else [given.target]:
            TARGETS[name](given.replay.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(MISSING, file=sys.stderr)
        return 2
    if given.target != "all":
        fuzz(given.target, given.seconds)
    share = max(1, given.seconds // len(TARGETS))
    for name in TARGETS:
        start = time.monotonic()
        print(f"== {name}, {share} s", flush=True)
        command = [sys.executable, __file__, name, "--seconds", str(share)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=share + SLACK_S)
        except subprocess.TimeoutExpired:
            print(f"{name} did not end in time")
            return 1
        lines = (done.stdout + done.stderr).splitlines()
        if done.returncode:
            print("\n".join(lines[-40:]))
            print(f"{name} is broken; the input lies in {CORPUS / name}")
            return done.returncode
        stats = [
            line.rpartition(":")[2].strip() for line in lines if line.startswith(("stat::number_of_executed_units",))
        ]
        covered = [word for line in lines if " cov: " in line for word in [line.split(" cov: ")[1].split()[0]]]
        print(f"   {(stats or ['?'])[-1]} inputs, {(covered or ['?'])[-1]} branches, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
