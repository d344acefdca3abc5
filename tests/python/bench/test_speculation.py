"""The measurement of drafting takes long replies of the same text, and says what it needs."""

import json
from pathlib import Path

import pytest

from tandem.bench import decode, speculation
from tandem.bench.arms import EngineArm
from tests.python.bench.test_decode import parse
from tests.python.engine.checkpoint import make_checkpoint, make_drafter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "model")
    make_drafter(path.parent / "drafter", seed=1)
    return path


def test_a_model_without_a_drafter_is_refused(folder: Path) -> None:
    with pytest.raises(speculation.SpeculationError, match="holds no drafter"):
        next(speculation.measure(folder, parse("--compare", "speculation")))


def test_prompts_with_long_replies_are_taken_in_their_order(folder: Path) -> None:
    engine = EngineArm(folder, "float32", 256, 1)
    prompts = [[place + 7 * k for k in range(5)] for place in range(20)]
    lengths = [engine.reply_length(prompt, speculation.NUM_TOKENS + 2) for prompt in prompts]
    long = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length > speculation.NUM_TOKENS + 1]
    assert 2 < len(long) < len(prompts)
    assert speculation.long_replies(engine, prompts, 3) == long[:3]
    with pytest.raises(speculation.SpeculationError, match=f"21 replies of 96 tokens are needed, {len(long)} are"):
        speculation.long_replies(engine, prompts, 21)


def test_a_drafting_engine_decodes_the_same_window_in_fewer_steps_at_most(folder: Path) -> None:
    windows, counts = [], []
    for draft_len in (0, 3):
        drafter = folder.parent / "drafter" if draft_len else None
        engine = EngineArm(folder, "float32", 256, 2, drafter=drafter, draft_len=draft_len)
        engine.prepare([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]])
        windows.append(engine.window(20))
        counts.append(engine.speculation().total.num_rounds)
    assert windows[0].tokens == windows[1].tokens
    assert [len(row) for row in windows[0].tokens] == [20, 20]
    assert counts[0] == 0 < counts[1]


@pytest.mark.slow
def test_the_whole_measurement_on_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--threads", "1", "--rounds", "1", "--draft-lens", "3", "5"]
    assert decode.main(parse("--compare", "speculation", *sizes, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cells"] == []
    cells = report["speculation"]
    assert [(cell["draft_len"], cell["batch"], cell["tokens_checked"]) for cell in cells] == [(3, 2, 192), (5, 2, 192)]
    for cell in cells:
        # Two windows of two sequences; a round that ends within its accepted drafts has no token after them.
        acceptance = cell["acceptance"]
        assert acceptance["drafted"] == cell["draft_len"] * acceptance["rounds"]
        assert 2 * 192 <= acceptance["accepted"] + acceptance["rounds"] <= 2 * 192 + 4
        assert acceptance["mean_length"] > 0.8 * (1 + cell["draft_len"])
        assert len(cell["windows_ms"]) == len(cell["plain_windows_ms"]) == 2
    decode.print_table(report)
    assert "mean acceptance length" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "8"])
def test_a_draft_length_out_of_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--draft-lens", text)
    assert f"{text} is not allowed, it must be 1 to 7" in capsys.readouterr().err
