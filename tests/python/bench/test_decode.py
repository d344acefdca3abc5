"""The decode measurement checks its tokens before it times, and says what it needs."""

import argparse
import json
from pathlib import Path

import pytest

from tandem import demo
from tandem.bench import decode, transformers_model
from tandem.bench.arms import Window
from tandem.bench.checkpoint import (
    bytes_read_per_step,
    cache_bytes_read_per_step,
    num_parameters,
    write_random_checkpoint,
)
from tandem.bench.command import add_parser
from tandem.core import layout
from tandem.models import MiniMaxM3Config


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "decode", *words])


def window(tokens: list[list[int]]) -> Window:
    seconds = [0.001] * len(tokens[0])
    return Window(tokens, seconds, sum(seconds))


def test_equal_tokens_are_counted() -> None:
    assert decode.check_same(window([[1, 2], [3, 4]]), window([[1, 2], [3, 4]]), [[1.0] * 2] * 2) == 4


def test_a_clear_choice_that_differs_is_an_error_that_names_the_place() -> None:
    with pytest.raises(decode.WrongTokensError, match=r"sequence 1 .* token 9 at step 1, transformers 4 by 0\.500"):
        decode.check_same(window([[1, 2], [3, 9]]), window([[1, 2], [3, 4]]), [[1.0, 1.0], [1.0, 0.5]])


def test_a_sequence_is_followed_up_to_its_first_near_tie() -> None:
    margins = [[1.0, 0.001, 1.0]]
    assert decode.check_same(window([[1, 9, 8]]), window([[1, 2, 3]]), margins) == 1


def test_medians_and_rates_come_from_all_steps_of_an_arm() -> None:
    windows = [
        Window([[1, 2]], [0.010, 0.020], 0.016),
        Window([[1, 2]], [0.030, 0.040], 0.020),
    ]
    timing = decode.summarise(windows, batch=5)
    assert timing.step_ms == pytest.approx(25.0)
    assert timing.tokens_per_second == pytest.approx(200.0)
    assert timing.windows_ms == pytest.approx([15.0, 35.0])
    assert timing.cpu_ms == pytest.approx(8.0)


@pytest.mark.parametrize(("found", "shown"), [(None, "none"), ("5.16.2", "5.16.2"), ("4.57.0", "4.57.0")])
def test_a_missing_or_old_transformers_is_refused_with_what_to_install(
    found: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "version", lambda _: found)
    with pytest.raises(transformers_model.TransformersMissingError, match=f"found is {shown}: pip install"):
        decode.run(parse())


@pytest.mark.parametrize("installed", ["5.17.0", "5.18.1", "6.0.0"])
def test_a_new_enough_transformers_is_taken(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "version", lambda _: installed)
    assert transformers_model.require() is None


def test_the_random_checkpoint_has_forty_million_parameters_in_the_released_geometry(tmp_path: Path) -> None:
    config = MiniMaxM3Config.from_pretrained(write_random_checkpoint(tmp_path))
    assert 38e6 < num_parameters(config) < 42e6
    # The embedding and the experts that a token does not take are not read.
    assert 0.3 < bytes_read_per_step(config) / (2 * num_parameters(config)) < 0.95
    assert config.num_hidden_layers == 8
    assert (config.num_key_value_heads, config.head_dim, config.block_size, config.topk_blocks) == (4, 128, 128, 16)


def test_a_step_reads_all_of_the_cache_in_dense_layers_and_the_chosen_blocks_in_sparse_ones() -> None:
    config = MiniMaxM3Config.from_pretrained(demo.path())
    keys_and_values, index_keys = 2 * 4 * 128, 128
    per_token = 3 * keys_and_values + 5 * index_keys
    for context in (100, 512, 4096):
        expected = per_token * context + 5 * keys_and_values * min(context, 4 * 128)
        assert cache_bytes_read_per_step(config, context, layout.ElementType.FP32) == 4 * expected
        assert cache_bytes_read_per_step(config, context, layout.ElementType.BF16) == 2 * expected


@pytest.mark.slow
def test_the_whole_measurement_on_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--context", "150", "--threads", "1", "--tokens", "3", "--rounds", "1"]
    words = ["--models", "demo", "--compare", "transformers", *sizes, "--json"]
    assert decode.main(parse(*words)) == 0
    report = json.loads(capsys.readouterr().out)
    (cell,) = report["cells"]
    assert (cell["model"], cell["batch"], cell["context"], cell["threads"]) == ("demo", 2, 150, 1)
    assert cell["tokens_checked"] == 6
    assert cell["ratio"] > 1
    assert cell["ratio_range"][0] <= cell["ratio_range"][1]
    assert report["environment"]["transformers"].startswith("5.")
