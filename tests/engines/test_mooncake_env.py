import importlib.metadata
import subprocess
import sys

import pytest

from orchestrator.engines import mooncake_env
from protocols.errors import ConfigError, EngineUnavailableError


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The Mooncake wheels that seem to be installed."""
    installed: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return installed


def test_settings_are_made_and_the_users_win() -> None:
    environ = {"MC_TCP_LANES_PER_PEER": "16", "PATH": "/bin"}
    mooncake_env.prepare(environ)
    assert environ == {
        "PATH": "/bin",
        "MC_TCP_LANES_PER_PEER": "16",
        "MC_LOG_LEVEL": "ERROR",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
        "MC_TCP_STATUS_TIMEOUT_SEC": "5",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }


@pytest.mark.parametrize(
    "name, value",
    [
        ("MC_USE_TENT", "1"),
        ("MC_USE_TENT", "0"),  # Mooncake looks only whether it is there
        ("MC_USE_TEV1", "1"),
        ("MC_LOG_DIR", "/tmp"),
        ("MC_TCP_PROTO", "1"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "0"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "OFF"),
        ("MC_DISABLE_METACACHE", "1"),
    ],
)
@pytest.mark.parametrize("already_imported", [False, True])
def test_a_refused_setting_is_named_with_its_value_and_the_reason(
    name: str, value: str, already_imported: bool
) -> None:
    environ = {name: value}
    with pytest.raises(ConfigError) as caught:
        mooncake_env.prepare(environ, already_imported=already_imported)
    text = str(caught.value)
    assert name in text
    assert f"value={value}" in text
    assert len(text) > len(name) + 60
    assert ("before anything imports" in text) == already_imported
    assert environ == {name: value}


@pytest.mark.parametrize("name, value", [("MC_TCP_PROTO", "2"), ("MC_TCP_ENABLE_CONNECTION_POOL", "1")])
def test_a_harmless_value_passes(name: str, value: str) -> None:
    mooncake_env.prepare({name: value})


def test_settings_that_come_too_late_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"MC_LOG_LEVEL": "WARNING"}
    mooncake_env.prepare(environ, already_imported=True)
    assert "MC_HANDSHAKE_CONNECT_TIMEOUT" in caplog.text
    assert "MC_LOG_LEVEL" not in caplog.text
    assert "MC_HANDSHAKE_CONNECT_TIMEOUT" not in environ, "it would look as if it applied"
    assert environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "5"


def test_a_missing_wheel_names_the_extras(wheels: dict[str, str]) -> None:
    with pytest.raises(EngineUnavailableError) as caught:
        mooncake_env.installed_version()
    for extra in ("cpu", "cuda12", "cuda13"):
        assert f"pip install 'kvferry[{extra}]'" in str(caught.value)


@pytest.mark.row("B1")
def test_an_old_wheel_is_refused_with_found_and_needed(wheels: dict[str, str]) -> None:
    wheels["mooncake-transfer-engine"] = "0.3.12.post1"
    with pytest.raises(EngineUnavailableError) as caught:
        mooncake_env.installed_version()
    assert "found=0.3.12.post1" in str(caught.value)
    assert "needed=0.3.13.post1" in str(caught.value)
    assert "kvferry[cuda12]" in str(caught.value)


def test_an_old_wheel_beside_a_new_one_is_refused(wheels: dict[str, str]) -> None:
    wheels["mooncake-transfer-engine-cuda13"] = "0.3.14"
    assert mooncake_env.installed_version() == "0.3.14"
    wheels["mooncake-transfer-engine"] = "0.3.9"
    with pytest.raises(EngineUnavailableError):
        mooncake_env.installed_version()


def test_versions_are_ordered() -> None:
    ascending = [
        "",
        "0.3.9",
        "0.3.12.post1",
        "0.3.13rc1",
        "0.3.13",
        "0.3.13.post1",
        "0.3.14rc1",
        "0.3.14",
        "0.10",
        "1.0",
    ]
    keys = [mooncake_env.version_key(version) for version in ascending]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize(
    "message, expected",
    [
        ("libibverbs.so.1: cannot open shared object file: No such file or directory", "apt-get install libibverbs1"),
        ("liburing.so.2: cannot open shared object file: No such file or directory", "apt-get install liburing2"),
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "kvferry[cpu]"),
        ("libcudart.so.12: cannot open shared object file: No such file or directory", "kvferry[cpu]"),
        ("libstrange.so.3: cannot open shared object file: No such file or directory", "libstrange.so.3"),
        ("undefined symbol: foo", "undefined symbol: foo"),
    ],
)
def test_a_failed_import_says_what_to_install(message: str, expected: str) -> None:
    assert expected in str(mooncake_env.explain(ImportError(message)))


@pytest.mark.mooncake
def test_the_real_import_is_made_once_with_the_settings() -> None:
    code = """
import os, sys
from orchestrator.engines import mooncake_env
assert "mooncake.engine" not in sys.modules
module = mooncake_env.load()
assert module is mooncake_env.load() is sys.modules["mooncake.engine"]
assert os.environ["MC_LOG_LEVEL"] == "ERROR"
assert module.TransferEngine
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.mooncake
def test_an_import_by_somebody_else_is_checked() -> None:
    code = """
import os
os.environ["MC_DISABLE_METACACHE"] = "1"
import mooncake.engine
from orchestrator.engines import mooncake_env
from protocols.errors import ConfigError
try:
    mooncake_env.load()
except ConfigError as error:
    assert "load() before anything imports" in str(error)
    raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 7


def test_the_package_does_not_need_the_wheel() -> None:
    code = """
import sys
sys.modules["mooncake"] = None
import orchestrator.engines as engines
assert engines.LoopbackFabric and "orchestrator.engines.mooncake" not in sys.modules
assert engines.MooncakeEngine
try:
    engines.Nothing
except AttributeError:
    raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 7
