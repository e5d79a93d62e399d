import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.engines import mooncake_abi, mooncake_env
from protocols.errors import EngineUnavailableError

EVERYTHING = frozenset(mooncake_abi.SYMBOLS)


class Child:
    """What the self-test's process does, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.returncode = 0
        self.stdout = b'some native line\n["batch-status", "free-engine"]\n'
        self.error: Exception | None = None
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert command == [sys.executable, "-m", "orchestrator.engines.mooncake_selftest"]
        self.runs += 1
        if self.error is not None:
            raise self.error
        return subprocess.CompletedProcess(command, self.returncode, self.stdout, b"")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library file of our own, a cache of our own, and nothing remembered."""
    path = tmp_path / "engine.so"
    path.write_bytes(b"one")
    module = type(sys)("mooncake.engine")
    module.__file__ = str(path)
    monkeypatch.setattr(mooncake_env, "load", lambda: module)
    monkeypatch.setattr(mooncake_env, "installed_version", lambda: "0.3.14")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mooncake_abi.trusted.cache_clear()
    yield path
    mooncake_abi.trusted.cache_clear()


def again() -> frozenset[str]:
    """As the next process would answer."""
    mooncake_abi.trusted.cache_clear()
    return mooncake_abi.trusted()


def test_the_verdict_is_kept_for_this_very_library(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    assert again() == again() == {"batch-status", "free-engine"}
    assert child.runs == 1
    library.write_bytes(b"another build")
    again()
    assert child.runs == 2
    monkeypatch.setattr(mooncake_env, "installed_version", lambda: "0.3.15")
    again()
    assert child.runs == 3


@pytest.mark.parametrize("returncode", [1, -11, -6])
def test_a_child_that_fails_or_crashes_means_no_feature(
    library: Path, monkeypatch: pytest.MonkeyPatch, returncode: int, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(monkeypatch)
    child.returncode = returncode
    assert again() == again() == frozenset()
    assert child.runs == 1
    assert str(returncode) in caplog.text


@pytest.mark.parametrize("error", [OSError("no process"), subprocess.TimeoutExpired("x", 1)])
def test_a_child_without_a_verdict_is_asked_again_next_time(
    library: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    child = Child(monkeypatch)
    child.error = error
    assert again() == frozenset()
    child.error = None
    assert again() == {"batch-status", "free-engine"}


@pytest.mark.parametrize("text", ["", "[", "7", '["no-such-feature"]', '{"batch-status": true}'])
def test_a_spoilt_cache_counts_as_none(library: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    child = Child(monkeypatch)
    path = mooncake_abi.verdict_path(str(library))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert again() == {"batch-status", "free-engine"}
    assert child.runs == 1


def test_a_cache_that_cannot_be_written_is_no_error(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    child = Child(monkeypatch)
    (tmp_path / "cache").write_text("a file, not a directory")
    assert again() == again() == {"batch-status", "free-engine"}
    assert child.runs == 2
    assert "could not be kept" in caplog.text


@pytest.mark.mooncake
def test_this_machines_wheel_passes_its_self_test() -> None:
    library = str(mooncake_env.load().__file__)
    assert mooncake_abi.exported(library) == EVERYTHING
    assert mooncake_abi.run_selftest() == EVERYTHING


@pytest.mark.mooncake
def test_a_symbol_that_is_missing_is_named_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(mooncake_env.load().__file__)
    monkeypatch.setitem(mooncake_abi.SYMBOLS, mooncake_abi.FREE_ENGINE, ("_ZNothing",))
    assert mooncake_abi.exported(library) == EVERYTHING - {mooncake_abi.FREE_ENGINE}
    abi = mooncake_abi.Abi(library, 0)
    with pytest.raises(EngineUnavailableError, match="_ZNothing"):
        abi.free_engine()


def test_structures_have_the_sizes_the_calling_convention_needs() -> None:
    import ctypes

    assert ctypes.sizeof(mooncake_abi._Status) == 24, "over 16 bytes, or libffi returns it in registers"
    assert ctypes.sizeof(mooncake_abi._TransferStatus) == 16
    assert ctypes.sizeof(mooncake_abi._String) == 32
