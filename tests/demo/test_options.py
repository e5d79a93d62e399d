"""The demo's command line: defaults, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.demo import main, options
from orchestrator.demo.prompts import DEFAULT
from protocols.errors import ConfigError


def test_defaults() -> None:
    chosen = options.parse([])
    assert chosen.prompts == DEFAULT
    assert (chosen.max_new_tokens, chosen.chunk_tokens, chosen.layer_group, chosen.page_size) == (32, 256, 8, 16)
    assert (chosen.pool_pages, chosen.repeats, chosen.link_gbps) == (128, 5, 1.0)
    assert (chosen.inject, chosen.json, chosen.trace, chosen.prefill_address, chosen.control_port) == (
        None,
        None,
        None,
        None,
        0,
    )


def test_quick_and_injected_runs_are_short() -> None:
    assert (options.parse(["--quick"]).max_new_tokens, options.parse(["--quick"]).repeats) == (16, 1)
    injected = options.parse(["--inject", "drop-layer"])
    assert (injected.prompts, injected.max_new_tokens, injected.repeats) == (DEFAULT[:1], 8, 1)


def test_prompts_given_replace_the_defaults_and_get_short_names(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file", encoding="utf-8")
    chosen = options.parse(["--prompt", "a  question\nof more than twenty-four characters", "--prompt-file", str(file)])
    assert [prompt.name for prompt in chosen.prompts] == ["a question of more than…", "from a file"]
    assert chosen.prompts[0].text == "a  question\nof more than twenty-four characters"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", " \n"], "is empty: there is nothing to prefill"),
        (["--prompt-file", "{tmp}/empty"], "empty is empty"),
        (["--prompt-file", "{tmp}/none"], "cannot read --prompt-file {tmp}/none: No such file or directory"),
        (["--prompt-file", "{tmp}/latin"], "latin is not UTF-8 text"),
        (["--page-size", "0"], "--page-size must be at least 1, not 0"),
        (["--chunk-tokens", "-3"], "--chunk-tokens must be at least 1, not -3"),
        (["--layer-group", "0"], "--layer-group must be at least 1, not 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
        (["--page-size", "x"], "invalid int value: 'x'. See kvferry demo --help"),
        (["--pool-tokens", "40000"], "--pool-tokens must be at most 32768, not 40000"),
        (["--page-size", "4096"], "a page of 4096 tokens is larger than the pool of 2048"),
        (["--link-gbps", "0"], "--link-gbps must be a positive number, not 0"),
        (["--link-gbps", "nan"], "--link-gbps must be a positive number, not nan"),
        (["--inject", "gremlins"], "invalid choice: 'gremlins'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--control-port", "70000"], "--control-port must be between 0 and 65535, not 70000"),
        (["--prefill-address", "127.0.0.1:80"], "must look like tcp://HOST:PORT, not '127.0.0.1:80'"),
        (["--prefill-address", "tcp://127.0.0.1:0"], "must look like tcp://HOST:PORT"),
        (["--json", "{tmp}/none/out.json"], "there is no directory {tmp}/none"),
        (["--trace", "{tmp}"], "--trace {tmp} is a directory"),
    ],
)
def test_a_mistake_gives_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    message = message.replace("{tmp}", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        options.parse(arguments)
    assert message in str(caught.value)
    assert main.run(arguments) == main.MISTAKE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry demo: error: ")
    assert err.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--prompt-file", "--max-new-tokens", "--link-gbps", "--inject", "--quick", "--prefill-address"):
        assert option in text
