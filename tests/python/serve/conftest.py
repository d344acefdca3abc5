"""One server over a tiny random model and a random drafter, and the same in this process to compare with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM
from tandem.engine.tokenizer import NAMESPACE
from tests.python.engine.byte_tokenizer import byte_tokenizer_json
from tests.python.engine.checkpoint import make_checkpoint, make_drafter
from tests.python.serve.server_process import ServerProcess, serve_model

# Uses every variable that the server passes on, so that a test can see what reached the template.
TEMPLATE = r"""
{%- if tools -%}
{{ ']~b]system\n' }}
{%- for tool in tools %}{{ '<tool>' + (tool.function | tojson) + '</tool>\n' }}{% endfor -%}
{{ '[e~[\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ ']~b]' + message.role }}{% if message.name %}{{ ' ' + message.name }}{% endif %}{{ '\n' }}
{%- if message.reasoning_content %}{{ '<mm:think>' + message.reasoning_content + '</mm:think>' }}{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
({{ call.function.name }}{% for k, v in call.function.arguments | items %} {{ k }}={{ v }}{% endfor %})
{%- endfor -%}
{{ '[e~[\n' }}
{%- endfor -%}
{%- if shout %}!{% endif -%}
{%- if add_generation_prompt -%}
{{ ']~b]ai\n' }}
{%- if thinking_mode == 'enabled' %}<mm:think>{% elif thinking_mode == 'disabled' %}</mm:think>{% endif -%}
{%- endif -%}
"""

MAX_BODY_BYTES = 50_000
MAX_REQUESTS = 12


def make_served_model(path: Path) -> Path:
    """A random model with a random drafter, whose vocabulary has the token before tags."""
    make_checkpoint(path)
    make_drafter(path / "eagle3", seed=5)
    (path / "tokenizer.json").write_text(byte_tokenizer_json(extra_tokens=[NAMESPACE]), encoding="utf-8")
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[ServerProcess]:
    limits = ["--max-body-bytes", str(MAX_BODY_BYTES), "--max-requests", str(MAX_REQUESTS)]
    with serve_model(folder, "--max-seats", "8", "--max-tokens-per-step", "32", *limits) as server:
        yield server
