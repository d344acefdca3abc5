"""`tandem generate`: what it prints, and that mistakes take one line."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tandem import LLM, SamplingParams
from tandem.cli import is_mistake, main, one_line
from tandem.engine.errors import InvalidParameterError
from tests.python.engine.checkpoint import make_checkpoint

FIELDS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "finish_reason",
    "tokens_per_second",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def generate(folder: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(folder), "--num-threads", "1", "--max-tokens", "6", *arguments])


def expected_text(folder: Path, prompt: str | list[dict[str, str]], **options: object) -> str:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, **options})
    with LLM(folder, num_threads=1) as llm:
        output = llm.generate(prompt, params) if isinstance(prompt, str) else llm.chat(prompt, params)
    return output[0].text


def test_a_prompt_prints_its_text_and_one_line_of_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--prompt", "hello", "--ignore-eos") == 0
    out = capsys.readouterr().out
    text, figures = out.rstrip("\n").rsplit("\n", 1)
    assert text == expected_text(folder, "hello", ignore_eos=True)
    assert figures.startswith("[6 tokens, ")
    for word in ("tokens/s", "load", "prefill", "decode", "plan", "model", "sample"):
        assert word in figures


def test_json_holds_the_promised_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--prompt", "hello", "--json", "--logprobs", "2", "--ignore-eos") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert result.keys() >= FIELDS
    assert result["text"] == expected_text(folder, "hello", ignore_eos=True)
    assert (result["prompt_tokens"], result["completion_tokens"], len(result["token_ids"])) == (5, 6, 6)
    assert result["finish_reason"] == "length"
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]


def test_a_file_of_prompts_gives_a_line_each(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nworld\n")
    assert generate(folder, "--prompts-file", str(file), "--json") == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["prompt"] for result in results] == ["hello", "world"]
    assert results[1]["text"] == expected_text(folder, "world")


def test_sampling_options_reach_the_sampler(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--seed", "7"]
    penalties = ["--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.1"]
    assert generate(folder, "--prompt", "hello", "--json", *options, *penalties, "--stop", "zzz") == 0
    wanted = {
        "temperature": 1.5,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 7,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "stop": ["zzz"],
    }
    assert json.loads(capsys.readouterr().out)["text"] == expected_text(folder, "hello", **wanted)


def test_a_prompt_in_chat_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--chat", "--prompt", "hi", "--system", "Be brief.", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert result["text"] == expected_text(folder, turns)


def test_a_conversation_keeps_its_history_and_reuses_its_pages(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n"))
    assert generate(folder, "--chat", "--json", "--ignore-eos") == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["prompt"], second["prompt"]) == ("first", "second")
    assert second["prompt_tokens"] > first["prompt_tokens"] + len("second")
    assert second["cached_tokens"] >= first["prompt_tokens"] // 4 * 4


def test_a_conversation_may_be_read_as_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n"))
    assert generate(folder, "--chat") == 0
    assert capsys.readouterr().out == expected_text(folder, [{"role": "user", "content": "first"}]) + "\n"


def mistake(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake prints."""
    assert generate(folder, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tandem: ")
    return captured.err


def test_mistakes_in_the_arguments_take_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--prompt" in mistake(folder, capsys)
    assert "empty" in mistake(folder, capsys, "--prompt", "")
    assert "temperature=-1.0" in mistake(folder, capsys, "--prompt", "x", "--temperature", "-1")
    assert "2,000 bytes" in mistake(folder, capsys, "--prompt", "x", "--kv-cache-bytes", "2000")
    assert "256 positions" in mistake(folder, capsys, "--prompt", "x", "--max-model-len", "257")
    assert "at most 255" in mistake(folder, capsys, "--prompt", "x" * 256)
    assert "nowhere.txt" in mistake(folder, capsys, "--prompts-file", str(tmp_path / "nowhere.txt"))
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "holds no prompt" in mistake(folder, capsys, "--prompts-file", str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfd")
    assert "UTF-8" in mistake(folder, capsys, "--prompts-file", str(tmp_path / "latin.txt"))


def damaged(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "damaged"))


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path / "none") in mistake(tmp_path / "none", capsys, "--prompt", "x")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    model = damaged(folder, tmp_path)
    (model / name).unlink()
    assert name.split(".")[-1] in mistake(model, capsys, "--prompt", "x")


def test_a_truncated_safetensors_file_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = damaged(folder, tmp_path)
    data = (model / "model.safetensors").read_bytes()
    for size in (len(data) - 100, 1000, 4):
        (model / "model.safetensors").write_bytes(data[:size])
        assert "model.safetensors" in mistake(model, capsys, "--prompt", "x")


def test_a_tensor_of_the_wrong_dtype_or_shape_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = damaged(folder, tmp_path)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    for wrong in (tensors[name].to(torch.int32), tensors[name][:-1].contiguous()):
        safetensors.torch.save_file({**tensors, name: wrong}, model / "model.safetensors")
        assert name.removeprefix("language_model.") in mistake(model, capsys, "--prompt", "x")


def test_another_architecture_is_refused_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = damaged(folder, tmp_path)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert "LlamaForCausalLM" in mistake(model, capsys, "--prompt", "x")


@pytest.mark.parametrize("content", ["{", "[]", '{"decoder": {"type": "WordPiece"}, "model": {}}', '{"decoder": null}'])
def test_a_malformed_tokenizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    model = damaged(folder, tmp_path)
    (model / "tokenizer.json").write_text(content)
    assert "tokenizer" in mistake(model, capsys, "--prompt", "x")


def test_inspect_prints_text_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    assert "token" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_page"] == 4
    assert main(["inspect", str(folder / "none")]) == 2


def test_our_own_faults_keep_their_trace() -> None:
    assert is_mistake(InvalidParameterError("a", 1, "b"))
    assert is_mistake(FileNotFoundError(2, "none", "x"))
    assert not is_mistake(ValueError("a fault"))
    assert not is_mistake(OSError("a fault"))
    assert one_line(ValueError("a\n  b\n")) == "a; b"


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from tandem.cli import make_parser; make_parser().format_help(); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("'torch'", "'numpy'", "'tokenizers'", "'jinja2'", "'tqdm'"):
        assert heavy not in loaded


@pytest.mark.parametrize("command", [[], ["generate"], ["eval"], ["inspect"], ["bench"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: tandem" in capsys.readouterr().out


def test_the_program_streams_and_exits_with_its_code(folder: Path) -> None:
    command = [sys.executable, "-m", "tandem.cli", "generate", "--model", str(folder), "--num-threads", "1"]
    good = subprocess.run([*command, "--prompt", "x", "--max-tokens", "3"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([*command, "--prompt", ""], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr
