"""The shipped checkpoint: complete, small enough, and of the shape that its evaluation relies on."""

import json
from decimal import Decimal

import jinja2
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from tandem import demo
from tandem.eval import retrieval_data
from tandem.models import CpuOps, load_model
from tandem.models.eagle3 import load_drafter
from tandem.models.minimax_m3_weights import open_weights

PAIR_LIMIT_BYTES = 24 * 2**20


def test_model_and_drafter_take_less_than_24_mib_together() -> None:
    files = [file for file in demo.path().rglob("*") if file.is_file()]
    assert demo.path() / "eagle3" / "model.safetensors" in files
    assert sum(file.stat().st_size for file in files) < PAIR_LIMIT_BYTES


def test_the_drafter_loads_with_the_targets_embedding_and_head() -> None:
    with safe_open(demo.path() / "eagle3" / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert not any("embed" in name or "head" in name for name in names)
    ops = CpuOps()
    target = load_model(demo.path(), torch.float32, ops)
    weights = open_weights(demo.path(), target.config)
    drafter = load_drafter(demo.path() / "eagle3", target, weights, torch.float32, ops)
    assert drafter.aux_layers == (2, 4, 5)
    assert (drafter.config.num_attention_heads, drafter.config.num_key_value_heads) == (8, 4)
    assert drafter.vocabulary.to_target is None


def test_router_tensors_are_fp32_and_all_others_bf16_under_the_official_prefix() -> None:
    with safe_open(demo.path() / "model.safetensors", "pt") as file:
        names = list(file.keys())
        dtypes = {name: file.get_slice(name).get_dtype() for name in names}
    assert all(name.startswith("language_model.") for name in names)
    for name, dtype in dtypes.items():
        router = name.endswith((".block_sparse_moe.gate.weight", ".e_score_correction_bias"))
        assert dtype == ("F32" if router else "BF16"), name


def test_every_home_is_a_sparse_layer_and_group_of_the_checkpoint() -> None:
    text = json.loads((demo.path() / "config.json").read_text(encoding="utf-8"))["text_config"]
    sparse = [layer for layer, on in enumerate(text["sparse_attention_config"]["sparse_attention_freq"]) if on]
    pairs = {(layer, group) for layer in sparse for group in range(text["num_key_value_heads"])}
    homes = [retrieval_data.home_of_category(category) for category in range(retrieval_data.NUM_CATEGORIES)]
    assert sorted(homes) == sorted(pairs)


def test_texts_survive_the_tokenizer_and_digits_stay_single() -> None:
    tokenizer = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    for text in ("The code of the amber falcon is 4821.", "£3.50 × 12 = 42\n  • naïve ☃", "a  b\n\nc"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("4821").tokens == ["4", "8", "2", "1"]


def test_the_chat_template_opens_the_thought_unless_told_otherwise() -> None:
    template = jinja2.Environment().from_string((demo.path() / "chat_template.jinja").read_text(encoding="utf-8"))
    messages = [{"role": "user", "content": "2+2?"}]

    def prompt(**how: str) -> str:
        return template.render(bos_token="]~!b[", messages=messages, add_generation_prompt=True, **how)

    start = "]~!b[]~b]user\n2+2?[e~[\n]~b]ai\n"
    assert prompt() == prompt(thinking_mode="enabled") == start + "<mm:think>"
    assert prompt(thinking_mode="disabled") == start + "</mm:think>"
    assert prompt(thinking_mode="adaptive") == start


def test_the_chat_template_keeps_thoughts_of_earlier_turns() -> None:
    template = jinja2.Environment().from_string((demo.path() / "chat_template.jinja").read_text(encoding="utf-8"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "4", "reasoning_content": "2+2=4"},
        {"role": "assistant", "content": "5"},
    ]
    assert template.render(bos_token="]~!b[", messages=messages) == (
        "]~!b[]~b]system\nBe brief.[e~[\n]~b]ai\n<mm:think>2+2=4</mm:think>4[e~[\n]~b]ai\n</mm:think>5[e~[\n"
    )


def test_held_out_word_problems_have_numbers_for_answers() -> None:
    problems = demo.held_out_word_problems()
    assert len(problems) == 1000
    assert all(Decimal(problem.answer).is_finite() for problem in problems)
    assert any(problem.drawn for problem in problems)
    assert not all(problem.drawn for problem in problems)
