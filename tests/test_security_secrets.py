"""Keys and tokens are in nothing that is written or logged, nothing that is logged holds more than a line, and neither
a configuration nor a body makes anything run.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokcap
from tests.proofs.security_urls import ANSWER, right_token
from tests.proofs.security_wire import Strict, through
from tokcap.asgi.capability import WithoutTokens
from tokcap.config import close_process_endpoints, load_config
from tokcap.errors import ConfigError
from tokcap.evaluation import summaries
from tokcap.serve.options import ServeOptions
from tokcap.serve.own_routes import metrics_text
from tokcap.serve.server import _logging

KEY = "sk-planted-key-of-the-engine"
OTHER_KEY = "sk-planted-wrong-key"
COOKIE = "planted-cookie"
QUERY = "planted-in-the-query"
ROLLOUT_SECRET = "planted-secret-of-the-rollouts"
CONTROL = "\r\nERROR: forged\x1b[2J\x00\x7f\x85\u2028\u202e"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config = tmp_path / "run.json"
    config.write_text(
        json.dumps(
            {
                "token_id_capture": {"enabled": True, "all_agents": True, "dir": str(tmp_path / "store")},
                "model_call_capture_dir": str(tmp_path / "calls"),
                "observability_enabled": True,
                "tokcap_serving": {"rollout_secret": "${oc.env:PLANTED}", "api_keys": ["${oc.env:PLANTED_KEY}"]},
            }
        )
    )
    for name in ("TOKCAP_DIR", "TOKCAP_ROLLOUT_SECRET", "TOKCAP_ROLLOUT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKCAP_CONFIG", str(config))
    monkeypatch.setenv("PLANTED", ROLLOUT_SECRET)
    monkeypatch.setenv("PLANTED_KEY", KEY)
    yield
    asyncio.run(close_process_endpoints())
    for name in ("uvicorn.access", "uvicorn.asgi", "hypercorn.access", "gunicorn.access"):
        logging.getLogger(name).filters.clear()


def request(path: str, *headers: str, body: bytes = b'{"model": "m", "messages": []}') -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def plain(status: str, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def test_planted_secrets_are_in_nothing_that_is_written_logged_or_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that are recorded, refused, lost and broken off; an engine that repeats the keys that it got."""
    token, wrong = right_token("r-1", ROLLOUT_SECRET), right_token("r-2", ROLLOUT_SECRET)
    planted = [KEY, OTHER_KEY, COOKIE, QUERY, ROLLOUT_SECRET, token, wrong]
    echoed = f"Incorrect API key provided: {KEY} {COOKIE}"
    answered = [
        plain("200 OK", ANSWER, f"set-cookie: {COOKIE}"),
        plain(
            "401 No",
            {"error": {"message": echoed, "type": "invalid_request_error", "code": "invalid_api_key"}},
            f"x-key: {KEY}",
        ),
        plain("500 No", {"detail": echoed}),
        plain("200 OK", {"error": {"message": echoed}}),
        b"HTTP/1.1 200 OK\r\nx-key: " + KEY.encode() + b"\r\n" + KEY.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{" + KEY.encode(),
    ]
    seen: list[Strict] = []

    def answering(asked: Strict) -> bytes:
        seen.append(asked)
        return answered[len(seen) % len(answered)]

    shown: list[bytes] = []

    async def act() -> None:
        async with through("h11", answering, timeout_s=0.5, api_keys=(KEY,)) as line:
            keys = (f"authorization: Bearer {KEY}", f"cookie: a={COOKIE}", "content-type: application/json")
            for segment, more in (
                (f"r-1~{token}", keys),
                ("r-1", (*keys, f"x-tokcap-rollout-token: {token}")),
                (f"r-1~{token}", (f"x-api-key: {OTHER_KEY}",)),
                (f"r-1~{wrong}", keys),
            ):
                for training in ("/training-token-capture", ""):
                    for _ in answered:
                        path = f"/ng-rollout/{segment}{training}/v1/chat/completions?api_key={QUERY}"
                        written, _ = await line.exchange(request(path, *more), within_s=60)
                        if b"HTTP/1.1 4" in written and b"Incorrect" not in written:
                            shown.append(written)
        await close_process_endpoints()

    for name in ("uvicorn.access", "uvicorn.asgi"):  # as the command configures them
        logging.getLogger(name).addFilter(WithoutTokens(queries=True))
    with caplog.at_level(1):
        asyncio.run(act())
    assert len(seen) == 24
    assert all(KEY.encode() in repr(each.headers).encode() for each in seen)  # the engine is to have it
    assert not [each for each in seen if token in repr(each)]
    places = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(places) > 5
    places |= {"the log": caplog.text.encode(), "the metrics": metrics_text()[0], "the answers": b"".join(shown)}
    assert len(shown) >= 24
    assert len(list(summaries(tmp_path / "calls", "r-1"))) >= 24
    for name in places:
        assert not [each for each in planted if each in name]
    found = [(name, each) for name, text in places.items() for each in planted if each.encode() in text]
    assert found == []


def test_options_and_the_logs_of_the_command_show_no_secrets() -> None:
    options = ServeOptions(upstream="http://127.0.0.1:9", engine="vllm", api_keys=(KEY,))
    assert KEY not in repr(options) + str(options) + repr(options.__rich_repr__())
    config = _logging("trace")
    for name in ("uvicorn.access", "uvicorn.asgi"):
        assert config["loggers"][name]["filters"] == ["without_tokens"]
    made = config["filters"]["without_tokens"]
    keep = made["()"](queries=made["queries"])
    path = f"/ng-rollout/r-1~{right_token('r-1')}/v1?key={QUERY}"
    said = ("x", "GET", path, "1.1", 200)
    record = logging.LogRecord("uvicorn.access", 20, "", 0, '%s - "%s %s HTTP/%s" %d', said, None)
    assert keep.filter(record)
    assert record.getMessage() == 'x - "GET /ng-rollout/r-1~***/v1?... HTTP/1.1" 200'
    trace = logging.LogRecord("uvicorn.asgi", 5, "", 0, "%s [%d] %s", ("x", 1, {"raw_path": path.encode()}), None)
    assert keep.filter(trace)
    assert right_token("r-1") not in trace.getMessage()


@pytest.mark.parametrize("training", ["/training-token-capture", ""])
def test_nothing_that_is_logged_holds_control_characters_of_others(
    training: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client and an engine could forge lines of the log, or send commands to the terminal that shows it."""
    token = right_token("r-1", ROLLOUT_SECRET)
    hostile = {**ANSWER, "model": CONTROL, "id": CONTROL, "usage": {"completion_tokens": 9}, CONTROL: CONTROL}
    answered = [
        plain("200 OK", hostile),
        plain("500 No", {"error": {"message": CONTROL, "type": CONTROL, "code": CONTROL}}),
        plain("200 OK", {"choices": [{"finish_reason": CONTROL, "message": {"role": CONTROL, "content": CONTROL}}]}),
        b"HTTP/1.1 200 OK\r\nx: a\x0bb" + CONTROL.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 \x1b[2J\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\x1b[2J\n\r\n",
        b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"error": "\\u001b[2J\\n"}\r\n\r\n',
    ]
    count = 0

    def answering(asked: Strict) -> bytes:
        nonlocal count
        count += 1
        return answered[count % len(answered)]

    async def act() -> None:
        async with through("h11", answering, timeout_s=0.3) as line:
            body = json.dumps({"model": CONTROL, "messages": [{"role": CONTROL}], CONTROL: CONTROL}).encode()
            path = f"/ng-rollout/r-1~{token}{training}/v1/chat/completions"
            for _ in answered:
                for each in (path, f"/ng-rollout/r%0a%1b[2J~{token}/v1", "/v1/%0a%1b%5b2J"):
                    asked = request(each, f"authorization: Bearer {KEY}", "idempotency-key: a\x1b[2Jb", body=body)
                    await line.exchange(asked, within_s=60)
        await close_process_endpoints()

    with caplog.at_level(1):
        asyncio.run(act())
    assert count > 10
    messages = [record.getMessage().removesuffix("\n") for record in caplog.records]
    assert len(messages) > 10
    assert [text for text in messages if not text.isprintable()] == []


@pytest.mark.parametrize("version", [CONTROL, "1.0\nERROR: forged", "9" * 101, ["1"], "1.0 \x1b[2J"])
def test_a_version_of_an_engine_that_would_forge_a_log_is_none(version: Any, caplog: pytest.LogCaptureFixture) -> None:
    def answering(asked: Strict) -> bytes:
        return plain("200 OK", {"version": version} if asked.target == b"/version" else {"data": []})

    async def act() -> bytes:
        async with through("h11", answering, engine="", engine_version="") as line:
            await line.exchange(request("/ng-rollout/r-1/v1/models"), within_s=60)
            written, _ = await line.exchange(b"GET /tokcap/health HTTP/1.1\r\nhost: x\r\n\r\n", within_s=60)
        await close_process_endpoints()
        return written

    with caplog.at_level(1):
        assert b'"engine_version":"unknown"' in asyncio.run(act())
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("tokcap")]
    assert messages
    assert all(text.isprintable() for text in messages)


# ---- nothing is made to run

PACKAGE = Path(tokcap.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
RUNNING = {"eval", "exec", "compile", "__import__"}
READING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess", "runpy", "code", "imp"}


def things_that_run(source: str) -> Iterator[str]:
    """What could make bytes of others run: modules that load objects, and functions that run text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in READING and not getattr(node, "level", 0))
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in RUNNING:
                yield called.id
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                if called.value.id == "os" and called.attr in ("system", "popen"):
                    yield f"os.{called.attr}"
                if called.value.id == "yaml" and called.attr != "load":
                    yield f"yaml.{called.attr}"
                if called.attr == "load" and called.value.id == "np":
                    allowed = [key.arg for key in node.keywords if key.arg == "allow_pickle"]
                    yield from () if allowed else ("np.load",)


def test_nothing_in_the_package_loads_objects_or_runs_text() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): list(things_that_run(path.read_text())) for path in MODULES}
    # This one starts its own interpreter with a text of its own, and no word of a store in it.
    assert {name: things for name, things in found.items() if things} == {"inspection/workers.py": ["subprocess"]}
    for source in ("import pickle", "from marshal import loads", "eval('1')", "np.load(x)", "yaml.unsafe_load(x)"):
        assert list(things_that_run(source)), source


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch ran']",
        "a: !!python/object/new:os.system ['touch ran']",
        "a: !!python/name:os.system",
        "a: !!python/module:os",
        "a: !!python/object:tokcap.FileStore {}",
        "!!python/object/apply:subprocess.Popen [[touch, ran]]",
    ],
)
def test_tags_of_yaml_make_nothing_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(str(tmp_path / "run.yaml"))
    assert not (tmp_path / "ran").exists()


def test_a_filter_behind_another_one_takes_queries_out_too() -> None:
    scope = {"path": "/v1/models", "query_string": f"api_key={QUERY}".encode()}
    record = logging.LogRecord("uvicorn.asgi", 5, "", 0, "Started scope=%s", (str(scope),), None)
    assert WithoutTokens().filter(record)
    assert WithoutTokens(queries=True).filter(record)
    assert QUERY not in record.getMessage()
