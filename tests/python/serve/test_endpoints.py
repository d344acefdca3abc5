"""The endpoints beside generation: models, tokens, metrics, and what the program says when it cannot serve."""

import asyncio
import importlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem import LLM
from tandem.cli import main
from tandem.serve import command
from tandem.serve.app import make_app
from tandem.serve.engine_client import EngineClient
from tandem.serve.metrics import ServerMetrics
from tandem.serve.options import EngineConfig, ServerOptions
from tandem.serve.service import Service
from tests.python.engine.byte_tokenizer import byte_tokenizer_json
from tests.python.serve.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow


def test_the_served_model_is_listed(server: ServerProcess) -> None:
    client = server.client()
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == ("tiny", "tandem")
    assert client.models.retrieve("tiny") == model
    assert server.get("/v1/models/other").status == 404
    assert server.get("/v1/models").json["data"][0]["max_model_len"] == 256


def test_text_becomes_tokens_and_comes_back(server: ServerProcess, llm: LLM) -> None:
    for text in ("hello", "]~b]ai\nKöln [e~[", "x" * 3000, "messages", '"messages"'):
        answer = server.post("/tokenize", {"model": "tiny", "prompt": text}).json
        assert answer["tokens"] == llm.tokenizer.encode(text)
        assert answer["count"] == len(answer["tokens"])
        assert server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text}
    hidden = server.post("/detokenize", {"tokens": llm.tokenizer.encode("a[e~["), "skip_special_tokens": True})
    assert hidden.json == {"prompt": "a"}
    refused = server.post("/detokenize", {"tokens": [300]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "tokens")


def metrics(server: ServerProcess) -> dict[str, float]:
    """Values of the samples, by name and labels but the model's name."""
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[" ".join([sample.name.removeprefix("tandem:"), *labels])] = sample.value
    return found


def test_metrics_count_what_was_served(server: ServerProcess) -> None:
    before = metrics(server)
    body = {"model": "tiny", "prompt": "metrics are counted, byte by byte", "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        assert server.post("/v1/completions", body).status == 200
    assert server.post("/v1/completions", body | {"n": 0}).status == 400
    after = metrics(server)

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("prompt_tokens_total") == 2 * 33
    assert grew("generation_tokens_total") == 2 * 5
    assert grew("prompt_tokens_cached_total") == 32
    assert grew("request_success_total length") == 2
    assert grew("e2e_request_latency_seconds_count") == grew("time_to_first_token_seconds_count") == 2
    assert grew("requests_refused_total 400") == 1
    assert (after["num_requests_running"], after["num_requests_waiting"]) == (0, 0)


def test_every_kind_of_number_is_shown_by_a_server_that_has_served(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "numbers of every kind", "max_tokens": 20, "ignore_eos": True}
    for _ in range(2):
        assert server.post("/v1/completions", body).status == 200
    shown = metrics(server)
    durations = ("time_to_first_token", "time_per_output_token", "e2e_request_latency", "request_queue_time")
    for name in durations:
        assert shown[f"{name}_seconds_count"] > 0
        assert shown[f"{name}_seconds_sum"] > 0
    for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "requests_submitted", "engine_steps"):
        assert shown[f"{name}_total"] > 0
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "request_aborts_total"):
        assert name in shown
    for part in ("plan", "launch", "wait"):
        assert shown[f"engine_step_seconds_total {part}"] > 0
    pages = [shown[f"kv_cache_pages {state}"] for state in ("free", "cached", "held", "leased")]
    assert sum(pages) == server.get("/v1/stats").json["pages"]["total"]
    for route in ("cold", "prefix_hit"):
        assert shown[f"spec_decode_num_drafts_total {route}"] > 0
        for kind in ("draft", "accepted"):
            by_place = [shown[f"spec_decode_num_{kind}_tokens_per_pos_total {place} {route}"] for place in range(3)]
            assert sum(by_place) == shown[f"spec_decode_num_{kind}_tokens_total {route}"]
            assert by_place == sorted(by_place, reverse=True)


def test_statistics_tell_what_became_of_drafts(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "drafts are verified", "max_tokens": 20, "ignore_eos": True}
    before = server.get("/v1/stats").json
    assert server.post("/v1/completions", body).status == 200
    after = server.get("/v1/stats").json
    rounds = [sum(route["num_rounds"] for route in stats["rounds"].values()) for stats in (before, after)]
    drafted = [sum(sum(route["drafted"]) for route in stats["rounds"].values()) for stats in (before, after)]
    assert rounds[0] < rounds[1]
    assert drafted[1] - drafted[0] == 3 * (rounds[1] - rounds[0])
    assert after["generated_tokens"] - before["generated_tokens"] == 20
    assert after["pages"]["free"] + after["pages"]["cached"] == after["pages"]["total"]
    assert all(not alarm["raised"] for alarm in after["alarms"].values())


def test_records_of_steps_are_read_and_drained(server: ServerProcess) -> None:
    server.request("POST", "/v1/stats")
    body = {"model": "tiny", "prompt": "recorded, " * 5, "max_tokens": 10, "ignore_eos": True}
    assert server.post("/v1/completions", body).status == 200
    read = server.get("/v1/stats?window=read").json["window"]
    drained = server.request("POST", "/v1/stats").json["window"]
    assert drained == read
    assert sum(record["num_generated"] for record in read["records"]) == 10
    assert sum(record["num_context_rows"] for record in read["records"]) == 2
    assert read["num_dropped"] == 0
    assert server.get("/v1/stats?window=read").json["window"]["records"] == []
    assert "window" not in server.get("/v1/stats").json
    assert server.get("/v1/stats?window=all").json["error"]["param"] == "window"


def test_a_path_with_a_strange_name_is_a_plain_404(server: ServerProcess) -> None:
    for path in ("/v1/models/%00", "/v1/models/a/b/../c", "/%2e%2e/etc/passwd", "/v1/completions/"):
        assert server.get(path).status in (307, 404)


def test_a_fault_of_the_server_is_json_that_does_not_tell_its_words() -> None:
    class Faulty:
        def unhealthy(self) -> str:
            raise RuntimeError("words for the log")

    options = ServerOptions(engine=EngineConfig(model="x"), model_path=Path(), served_model_name="x")
    nothing: Any = None
    client = cast(EngineClient, Faulty())
    service = Service(options, client, tokenizer=nothing, chat_template=nothing, metrics=ServerMetrics("x"))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.get("/health")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "words for the log" not in answer.text


# The program.


def test_a_missing_package_takes_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.import_module

    def without_uvicorn(name: str) -> object:
        if name == "uvicorn":
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(command.importlib, "import_module", without_uvicorn)
    assert main(["serve", "--model", "demo"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "(uvicorn): pip install 'tandem-serve[serve]'" in err


def run_serve(*arguments: str) -> tuple[int, str]:
    process = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "serve", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return process.returncode, process.stderr.splitlines()[-1]


@pytest.fixture
def empty_model(tmp_path: Path) -> str:
    """A folder with nothing but a tokenizer."""
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    return str(tmp_path)


def test_an_address_in_use_takes_one_line(empty_model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, line = run_serve("--model", empty_model, "--port", str(port))
    assert code == 2
    assert line.startswith(f"tandem: cannot listen on 127.0.0.1:{port}: ")


def test_a_model_that_cannot_be_built_takes_one_line(empty_model: str) -> None:
    code, line = run_serve("--model", empty_model, "--port", "0")
    assert code == 2
    assert line.startswith("tandem: ")
    assert "config.json" in line


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ServerOptions:
    """What the command line asks the server for."""
    asked: list[ServerOptions] = []
    monkeypatch.setattr("tandem.serve.server.run_server", lambda options: asked.append(options) or 0)
    assert main(["serve", *arguments]) == 0
    return asked[0]


def test_the_command_line_fills_in_the_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = options_of(monkeypatch, "--model", "demo")
    assert (plain.host, plain.port, plain.api_keys, plain.served_model_name) == ("127.0.0.1", 8000, [], "demo")
    assert plain == ServerOptions(
        engine=plain.engine, model_path=plain.model_path, served_model_name="demo", api_keys=[]
    )
    assert plain.engine == EngineConfig(model="demo", drafter="auto")
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    given = options_of(
        monkeypatch,
        *("--model", str(tmp_path), "--host", "::1", "--port", "0", "--max-body-bytes", "9", "--max-requests", "3"),
        *("--api-key", "zeroth", "--api-key-file", str(tmp_path / "keys"), "--served-model-name", "mine"),
        *("--request-timeout", "1.5", "--send-timeout", "2", "--shutdown-grace", "3", "--stall-timeout", "4"),
        *("--canary", "60", "--canary-prompts", "kept.jsonl", "--canary-allowance", "2"),
        *("--drafter", "none", "--max-seats", "5", "--no-prefix-cache", "--seed", "6", "--access-log"),
    )
    assert given == ServerOptions(
        engine=EngineConfig(model=str(tmp_path), max_seats=5, enable_prefix_cache=False, seed=6),
        model_path=tmp_path,
        served_model_name="mine",
        host="::1",
        port=0,
        api_keys=["zeroth", "first", "second"],
        max_requests=3,
        max_body_bytes=9,
        request_timeout_s=1.5,
        send_timeout_s=2,
        shutdown_grace_s=3,
        stall_s=4,
        access_log=True,
        canary_interval_s=60,
        canary_prompts=Path("kept.jsonl"),
        canary_allowance=2,
    )


@pytest.mark.parametrize(
    "option",
    [
        *("--max-requests=0", "--request-timeout=nan", "--send-timeout=0", "--port=x", "--api-key=", "--api-key= x"),
        *("--canary=0", "--canary=-1", "--canary=inf", "--canary-allowance=-1"),
    ],
)
def test_a_senseless_option_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--model", "demo", option])
    assert caught.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


def test_without_a_host_only_loopback_is_listened_on(server: ServerProcess) -> None:
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{server.port:04X}" in listening
    assert f"00000000:{server.port:04X}" not in listening
