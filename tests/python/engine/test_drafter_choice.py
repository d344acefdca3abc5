"""Which drafter an `LLM` loads: the one inside the model's folder, another one, or none."""

import json
import logging
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.cli import main
from tandem.engine.errors import InvalidParameterError
from tandem.models import CheckpointError
from tests.python.engine.checkpoint import make_checkpoint, make_drafter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a drafter inside its folder, and another drafter beside it."""
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "model")
    make_drafter(path / "eagle3", seed=1)
    make_drafter(path.parent / "other", seed=2)
    return path


def drafted(llm: LLM) -> int:
    llm.generate("hello", GREEDY)
    return llm.stats().scheduler.num_drafted_tokens


def test_the_drafter_inside_the_models_folder_is_taken_by_default(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tandem"), LLM(folder, num_threads=1) as llm:
        assert llm.limits.max_draft_len == 3
        assert drafted(llm) > 0
        text = llm.generate("hello", GREEDY)[0].token_ids
    assert f"drafter: {folder / 'eagle3'}" in caplog.text
    with LLM(folder, drafter=None, num_threads=1) as llm:
        assert llm.limits.max_draft_len == 0
        assert drafted(llm) == 0
        assert llm.generate("hello", GREEDY)[0].token_ids == text


def test_a_path_takes_that_drafter_and_a_model_without_one_runs_without(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tandem"), LLM(folder, drafter=folder.parent / "other", num_threads=1) as llm:
        assert drafted(llm) > 0
    assert f"drafter: {folder.parent / 'other'}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "tandem"), LLM(make_checkpoint(tmp_path / "plain"), num_threads=1) as llm:
        assert drafted(llm) == 0
    assert "drafter: none" in caplog.text
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(folder, drafter=tmp_path / "nowhere", num_threads=1)


def test_a_draft_length_without_a_drafter_is_refused(folder: Path, tmp_path: Path) -> None:
    for model, options in ((folder, {"drafter": None}), (make_checkpoint(tmp_path / "plain"), {})):
        with pytest.raises(InvalidParameterError, match="draft_len=2 is not allowed: 0 without a drafter"):
            LLM(model, draft_len=2, **options)


def test_no_drafts_are_proposed_at_draft_length_zero(folder: Path) -> None:
    with LLM(folder, draft_len=0, num_threads=1) as llm:
        assert drafted(llm) == 0


def test_the_command_line_chooses_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(folder), "--num-threads", "1", "--max-tokens", "8", "--prompt", "hello"]
    for options, shown in (
        ([], True),
        (["--drafter", str(folder.parent / "other")], True),
        (["--drafter", "none"], False),
    ):
        assert main([*command, "--ignore-eos", *options]) == 0
        assert ("drafts accepted" in capsys.readouterr().out) is shown
    for options, path in (([], folder / "eagle3"), (["--drafter", "none"], None)):
        assert main(["inspect", str(folder), "--json", *options]) == 0
        drafter = json.loads(capsys.readouterr().out)["drafter"]
        assert (drafter and drafter["path"]) == (path and str(path))
