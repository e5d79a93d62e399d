"""``kvferry``: the command. A user's mistake gets one clear line and a non-zero exit code, never a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from protocols.errors import KvferryError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 well, 1 not well, 2 a mistake or something missing."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from orchestrator.demo.main import run

        return run(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="kvferry", description="Moves KV cache from prefill workers to decode workers, layer by layer."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {version('kvferry')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="a real language model: prefill in one process, generate in another (--help)")
    doctor = commands.add_parser("doctor", help="what this machine has, what is missing and how to get it")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    keygen = commands.add_parser("keygen", help="a key pair for authenticated, encrypted control traffic")
    keygen.add_argument("directory", metavar="DIR", help="where NAME.key and NAME.key_secret are written")
    keygen.add_argument("--name", default="kvferry", help="default: kvferry")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "keygen":
            from orchestrator.cli.keygen import run_keygen

            return run_keygen(chosen.directory, chosen.name)
        from orchestrator.cli.doctor import run_doctor

        return run_doctor(as_json=chosen.json)
    except KvferryError as error:
        print(f"kvferry {chosen.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
