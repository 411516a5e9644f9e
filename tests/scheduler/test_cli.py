"""The `paged` command as a user calls it: output, JSON, exit codes, and errors of one sentence."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from scheduler.cli import build_parser, main


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


@pytest.mark.parametrize("command", ["demo", "generate", "info"])
def test_every_command_explains_each_of_its_flags(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    parser = build_parser()._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr]
    for action in parser._actions:
        assert action.help, action
        for flag in action.option_strings:
            assert flag in text


@pytest.mark.parametrize("argv", [[], ["fly"], ["generate", "--no-such-flag"], ["generate", "--max-tokens", "many"]])
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: paged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "hi", "--model", "no/such/file.gguf"], "no/such/file.gguf"),
        (["generate", "hi", "--model", "tiny:llama", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--model", "tiny:llama", "--raw"], "no tokenizer"),
        (["generate", "hi", "--model", "tiny:llama", "--kv-dtype", "fp8"], "kv_dtype must be one of"),
        (["generate", "hi", "--model", "tiny:llama", "--page-size", "0"], "page_size must be at least 1"),
        (["generate", "hi", "--model", "tiny:llama", "--policy", "magic"], "the policy must be one of"),
        (["generate", "hi", "--model", "tiny:llama", "--proposer", "magic"], "the proposer must be one of"),
        (["demo", "--model", "tiny:llama"], "no chat template"),
    ],
)
def test_a_failure_is_exit_code_1_and_one_sentence(argv: list[str], message: str, capsys) -> None:
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("paged: error: ") and message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert "Traceback" not in captured.err


def test_generate_without_a_prompt_says_how_to_give_one(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert main(["generate", "--model", "tiny:llama"]) == 1
    assert "one a line on stdin" in capsys.readouterr().err


def test_info_names_backend_and_rows_and_ends_in_json(capsys) -> None:
    assert main(["info", "--json"]) == 0
    facts = last_json(capsys.readouterr().out)
    assert {"paged", "torch", "backend", "matrix_rows", "device"} <= facts.keys()


def test_info_of_a_model_gives_the_size_of_a_page(capsys) -> None:
    assert main(["info", "--model", "tiny:llama", "--page-size", "4", "--num-pages", "10", "--json"]) == 0
    facts = last_json(capsys.readouterr().out)
    assert facts["pool_tokens"] == 40 and facts["num_pages"] == 10
    values = facts["layers"] * 2 * facts["kv_heads"] * facts["head_dim"]
    assert facts["bytes_per_token"] == values * 4
    assert facts["page_bytes"] == values * 4 * 4


def test_the_command_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scheduler.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("paged ")


@pytest.mark.slow
def test_generate_streams_one_prompt_and_answers_several(smollm2, capsys) -> None:
    flags = ["--max-tokens", "8", "--json"]
    assert main(["generate", "Name a colour.", *flags]) == 0
    out = capsys.readouterr().out
    one = last_json(out)["outputs"][0]
    assert out.startswith(one["text"]) and len(one["token_ids"]) <= 8
    assert main(["generate", "Name a colour.", "Name a fruit.", *flags]) == 0
    two = last_json(capsys.readouterr().out)["outputs"]
    assert two[0]["token_ids"] == one["token_ids"] and len(two) == 2


@pytest.mark.slow
def test_generate_reads_prompts_from_stdin_and_raw_text_skips_the_template(smollm2, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The sea is\n\nThe sky is\n"))
    assert main(["generate", "--raw", "--max-tokens", "4", "--json"]) == 0
    outputs = last_json(capsys.readouterr().out)["outputs"]
    assert len(outputs) == 2
    assert all(o["num_prompt_tokens"] <= 4 for o in outputs)  # no system message around them


@pytest.mark.slow
def test_the_demo_saves_prefill_and_keeps_the_tokens(smollm2, capsys) -> None:
    assert main(["demo", "--max-tokens", "6", "--json"]) == 0
    out = capsys.readouterr().out
    result = last_json(out)
    assert result["same_tokens"] is True
    assert result["prefill_saved"] > 0.6
    assert result["off"]["cached_tokens"] == 0
    assert result["on"]["cached_tokens"] == 3 * 295
    assert out.count("cached 295 of") == 3
