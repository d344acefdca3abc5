"""Files of canary prompts: what is read, what is refused, and how answers are kept in them."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams, demo
from tandem.cli import EXIT_MISTAKE, main
from tandem.engine.chat import ChatTemplate
from tandem.engine.tokenizer import Tokenizer
from tandem.serve import canary_prompts
from tandem.serve.canary import Canary, CanaryAnswer, CanaryPrompt
from tandem.serve.canary_prompts import CanaryPrompts, CanaryPromptsError, default_path, read_prompts
from tests.python.engine.byte_tokenizer import byte_tokenizer_json

TOKENIZER = Tokenizer(byte_tokenizer_json())
GOOD = {"name": "a", "max_tokens": 5, "prompt": "hello"}
ANSWER = {"token_ids": [7, 8], "num_rounds": 1, "num_drafted": 3, "num_accepted": 0}
SIZES = {"vocab_size": 300, "tokens_per_page": 4, "max_model_len": 20}


def read(tmp_path: Path, *lines: object) -> CanaryPrompts:
    path = tmp_path / "kept.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_prompts(path, TOKENIZER, ChatTemplate())


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in GOOD.items() if key != name}


def test_a_prompt_is_a_text_a_conversation_or_ids_and_may_have_its_answer(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    prompts = read(
        tmp_path,
        GOOD | {"expected": ANSWER},
        "",
        without("prompt") | {"name": "b", "messages": turns},
        without("prompt") | {"name": "c", "token_ids": [9, 10, 11]},
    )
    rendered = TOKENIZER.encode(ChatTemplate().render([{"role": "user", "content": "hello"}]))
    assert prompts.prompts == [
        CanaryPrompt("a", tuple(TOKENIZER.encode("hello")), 5),
        CanaryPrompt("b", tuple(rendered), 5),
        CanaryPrompt("c", (9, 10, 11), 5),
    ]
    assert prompts.expected == {"a": CanaryAnswer((7, 8), 0, 1, 3, 0)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        (without("name"), "`name`"),
        (GOOD | {"name": ""}, r"\$\.name"),
        (without("max_tokens"), "`max_tokens`"),
        (GOOD | {"max_tokens": 1}, r"\$\.max_tokens"),
        (GOOD | {"max_tokens": "5"}, r"\$\.max_tokens"),
        (GOOD | {"prompt": 5}, r"\$\.prompt"),
        (without("prompt"), "given are none"),
        (GOOD | {"token_ids": [1]}, "given are prompt, token_ids"),
        (without("prompt") | {"token_ids": [1, "2"]}, r"\$\.token_ids\[1\]"),
        (without("prompt") | {"messages": [{"role": "robot", "content": "x"}]}, r"\$\.messages\[0\]\.role"),
        (without("prompt") | {"messages": [{"role": "user"}]}, "`content`"),
        (without("prompt") | {"messages": []}, "at least one message"),
        (GOOD | {"expected": {"token_ids": [1]}}, "`num_rounds`"),
        (GOOD | {"expected": ANSWER | {"token_ids": []}}, r"\$\.expected\.token_ids"),
        (GOOD | {"expected": ANSWER | {"num_accepted": -1}}, r"\$\.expected\.num_accepted"),
        (GOOD | {"temperature": 1}, "`temperature`"),
        (GOOD | {"name": "first"}, "'first' is there twice"),
    ],
)
def test_a_malformed_line_is_refused_with_its_file_its_number_and_its_field(
    tmp_path: Path, line: object, message: str
) -> None:
    with pytest.raises(CanaryPromptsError, match=rf"kept\.jsonl, line 3: .*{message}"):
        read(tmp_path, GOOD | {"name": "first"}, "", line)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CanaryPromptsError, match="holds no prompt"):
        read(tmp_path, "", "  ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "abc"}, "a has 3 tokens; at least one page of the cache, 4, is needed"),
        ({"max_tokens": 16}, "a has 5 tokens and max_tokens=16; together at most 20"),
        ({"prompt": None, "token_ids": [1, 2, 3, 300]}, "token id 300; allowed are 0 to 299"),
    ],
)
def test_a_prompt_that_an_engine_cannot_replay_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    read(tmp_path, GOOD | {"max_tokens": 15}).check(**SIZES)
    with pytest.raises(CanaryPromptsError, match=message):
        read(tmp_path, GOOD | change).check(**SIZES)


def test_a_model_folders_own_prompts_come_first(tmp_path: Path) -> None:
    assert default_path(demo.path()) == demo.path() / "canary.jsonl"
    assert default_path(tmp_path) == Path(canary_prompts.__file__).parent / "canary.jsonl"


def test_the_prompts_for_any_model_fill_a_page_of_the_released_one_and_end_within_a_copy() -> None:
    prompts = read_prompts(default_path(Path("/nowhere")), TOKENIZER, ChatTemplate())
    assert len(prompts.prompts) == 3
    for line in prompts.lines:
        assert line.prompt is not None
        # No tokenizer joins words or marks across blanks; a page of the released model has 128 tokens.
        assert len(re.findall(r"\w+|[^\w\s]", line.prompt)) >= 128
        end = line.prompt[-40:]
        assert line.prompt.count(end) == 3


PROMPT = "a prompt of more than one page for the canary"


def kept(folder: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["canary", "--model", str(folder), "--num-threads", "1", "--prompts", str(file)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_sound_engines_answers_are_kept_and_compared(
    folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = llm.limits.tokens_per_page
    lines = [{"name": str(i), "max_tokens": 12, "prompt": f"{i} {PROMPT} " + "x" * page} for i in range(2)]
    given, written = tmp_path / "given.jsonl", tmp_path / "written.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)))
    written.write_text("\n".join(kept(folder, given, capsys)))
    prompts = read_prompts(written, llm.tokenizer, llm.chat_template)
    assert [(line.name, line.prompt) for line in prompts.lines] == [(line["name"], line["prompt"]) for line in lines]
    for prompt in prompts.prompts:
        output = llm.generate([list(prompt.token_ids)], SamplingParams(temperature=0, max_tokens=12))[0]
        answer = prompts.expected[prompt.name]
        assert answer == CanaryAnswer.of_output(output)
        assert answer.num_drafted > 0
    # What was kept before is replaced, not compared.
    wrong = [json.loads(line) for line in written.read_text().splitlines()]
    wrong[0]["expected"]["token_ids"] = [1]
    given.write_text("\n".join(map(json.dumps, wrong)))
    assert kept(folder, given, capsys) == written.read_text().splitlines()

    async def send(prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
        params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens, cache_salt=salt)
        return CanaryAnswer.of_output(llm.generate([list(prompt.token_ids)], params)[0])

    results = asyncio.run(Canary(prompts.prompts, send, expected=prompts.expected).run())
    assert [(result.faults, result.not_compared) for result in results] == 4 * [((), None)]


def test_nothing_is_kept_where_the_routes_do_not_agree(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CanaryAnswer.of_output

    def damaged(output: object) -> CanaryAnswer:
        answer = real(output)  # type: ignore[arg-type]
        return CanaryAnswer((1, 2), answer.cached_tokens, 1, 3, 0) if answer.cached_tokens else answer

    file = tmp_path / "given.jsonl"
    file.write_text(json.dumps({"name": "a", "max_tokens": 4, "prompt": PROMPT}))
    monkeypatch.setattr(CanaryAnswer, "of_output", damaged)
    assert main(["canary", "--model", str(folder), "--num-threads", "1", "--prompts", str(file)]) == 1
    assert capsys.readouterr().out == ""


def test_prompts_that_cannot_be_used_take_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text(json.dumps(GOOD | {"prompt": "abc"}))
    command = ["canary", "--model", str(folder), "--num-threads", "1", "--prompts"]
    assert main([*command, str(file)]) == EXIT_MISTAKE
    assert "at least one page" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "none")]) == EXIT_MISTAKE
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert main(["serve", "--model", str(folder), "--port", "0", "--canary-prompts", str(file)]) == EXIT_MISTAKE
    assert "without its interval" in capsys.readouterr().err
