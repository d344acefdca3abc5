"""Conversations to prompts."""

from pathlib import Path

import pytest

from tandem.engine.chat import ChatTemplate, Message
from tandem.engine.errors import InvalidChatError
from tests.python.engine.byte_tokenizer import byte_tokenizer

TURNS: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def test_the_layout_of_m3_is_used_where_the_checkpoint_has_no_template() -> None:
    text = ChatTemplate().render([*TURNS, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}])
    assert text == (
        "]~!b[]~b]system\nBe brief.[e~[\n]~b]user\n2+2?[e~[\n]~b]ai\n4[e~[\n]~b]user\nsure?[e~[\n]~b]ai\n<mm:think>"
    )


@pytest.mark.parametrize(("mode", "ending"), [("enabled", "<mm:think>"), ("disabled", "</mm:think>"), ("adaptive", "")])
def test_the_thinking_mode_opens_the_reply(mode: str, ending: str) -> None:
    assert ChatTemplate().render(TURNS, thinking_mode=mode).endswith("]~b]ai\n" + ending)
    assert ChatTemplate().render(TURNS, add_generation_prompt=False).endswith("2+2?[e~[\n")


def test_control_strings_become_single_tokens_looked_up_by_string() -> None:
    tokenizer = byte_tokenizer()
    ids = ChatTemplate().encode(tokenizer, TURNS)
    assert ids[:2] == [tokenizer.token_id("]~!b["), tokenizer.token_id("]~b]")]
    assert ids[-1] == tokenizer.token_id("<mm:think>")


@pytest.mark.parametrize("messages", [[], [{"role": "robot", "content": "x"}], [{"role": "user", "content": None}]])
def test_a_malformed_conversation_is_refused(messages: list[Message]) -> None:
    with pytest.raises(InvalidChatError):
        ChatTemplate().render(messages)


def test_the_template_of_the_checkpoint_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "config {{ bos_token }}"}')
    assert ChatTemplate.from_pretrained(tmp_path).render(TURNS) == "config <s>"
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ thinking_mode }}{{ extra }}"
    )
    text = ChatTemplate.from_pretrained(tmp_path).render(TURNS, thinking_mode="adaptive", extra=7)
    assert text == "<s>system:Be brief.;user:2+2?;adaptive7"


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(InvalidChatError, match="no system turn"):
        ChatTemplate("{{ raise_exception('no system turn') }}").render(TURNS)


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for %}", "{{ ''.__class__.mro() }}"]
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidChatError):
        ChatTemplate(source).render(list(TURNS))


def test_the_built_in_layout_refuses_variables_it_does_not_know() -> None:
    with pytest.raises(InvalidChatError, match="colour"):
        ChatTemplate().render(TURNS, colour="red")


def test_json_in_a_template_is_plain() -> None:
    template = ChatTemplate(
        "{{ messages[0].content | tojson }}{{ messages[0] | tojson(ensure_ascii=True, indent=None) }}"
    )
    assert template.render([{"role": "user", "content": "<é>"}]) == (
        '"<é>"' + '{"role": "user", "content": "<\\u00e9>"}'
    )


def test_a_template_that_fails_on_a_conversation_refuses_it() -> None:
    with pytest.raises(InvalidChatError, match="failed"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(("source", "takes"), [("{{ tools }}", True), ("{{ messages }}", False), (None, False)])
def test_a_template_tells_whether_it_takes_a_variable(source: str | None, takes: bool) -> None:
    assert ChatTemplate(source).takes("tools") is takes
    assert ChatTemplate(source).takes("messages") is (source != "{{ tools }}")
