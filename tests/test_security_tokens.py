"""Rollout tokens, and ids that want to be paths: one tenant can't write to the rollout of another."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from tests.proofs import security, security_urls
from tests.proofs.security_urls import SECRET, Served, right_token, sent
from tokcap import FileStore
from tokcap.asgi import CaptureMiddleware, rollout_base_url, rollout_token
from tokcap.asgi.capability import RolloutGuard, WithoutTokens, redacted
from tokcap.asgi.settings import ServingSettings, serving_settings
from tokcap.asgi.urls import capture_url
from tokcap.config import close_process_endpoints
from tokcap.errors import ConfigError, InvalidIdError, InvalidOptionError
from tokcap.evaluation import summaries

TRAINING = "/training-token-capture"
CHAT = "/v1/chat/completions"
OTHER_SECRET = "another secret, which came before"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TOKCAP_DIR", "TOKCAP_CONFIG", "TOKCAP_ROLLOUT_SECRET", "TOKCAP_ROLLOUT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield
    asyncio.run(close_process_endpoints())


def forget_filters() -> None:
    for name in ("uvicorn.access", "uvicorn.asgi", "hypercorn.access", "gunicorn.access"):
        logging.getLogger(name).filters.clear()


# ---- ids


def test_drawn_paths_are_read_as_the_contract_says_or_refused() -> None:
    """Separators, dots, NUL, look-alikes, 10,000 characters, percent-encoded once and twice, overlong UTF-8, `;`."""
    assert security.urls(seed=3, count=8_000) == (8_000, [])


def test_a_reader_of_urls_that_decodes_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = "tokcap.asgi.urls.unquote_to_bytes"
    monkeypatch.setattr(twice, lambda text: unquote_to_bytes(unquote_to_bytes(text)))
    assert security.urls(seed=3, count=3_000)[1]


@pytest.mark.parametrize(
    "segment",
    [
        *(
            "..%2f..%2fetc",
            "..%5c..%5cetc",
            "%2e%2e",
            "%252e%252e%252f",
            "r%00",
            "r%0a",
            "r;a=b",
            "r%3ba=b",
            "%c0%ae%c0%ae",
        ),
        *("r%e2%80%ae1", "%ef%bd%81", "%d0%b0", "r%20", "r+1", "x" * 10_000, "%78" * 3_334, "~", "~r-1", "r%0d%0ax: y"),
    ],
)
def test_an_id_that_is_none_reaches_neither_the_engine_nor_the_store(segment: str, tmp_path: Path) -> None:
    served = Served(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, body = sent(served, f"/ng-rollout/{segment}{TRAINING}{CHAT}".encode())
    assert (status, served.reached, served.body_reads) == (400, [], 0)
    assert len(body) < 600
    assert not set(body) & {*range(0x20), 0x7F}
    assert sorted(tmp_path.rglob("*")) == before


# ---- tokens


def test_drawn_tokens_reach_the_engine_only_if_they_are_right(tmp_path: Path) -> None:
    count, problems = security.tokens(tmp_path, seed=2, count=150)
    assert (count, problems) == (150, [])


def test_a_guard_that_compares_a_part_only_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compare(one[:8], other[:8]))
    assert security.tokens(tmp_path, seed=2, count=60)[1]


def test_tokens_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", noted)
    guard = RolloutGuard([SECRET, OTHER_SECRET])
    right, older = right_token("r-1").encode(), right_token("r-1", OTHER_SECRET).encode()
    assert guard.admits("r-1", [right])
    assert compared == [(right, right), (older, right)]  # no early end
    assert guard.admits("r-1", [older])
    assert guard.admits("r-1", [older, right])
    assert not guard.admits("r-1", [right, b"x"])
    assert not guard.admits("r-1", [])
    assert RolloutGuard().admits("r-1", [])


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_token_of_a_rollout_lets_its_calls_through_and_no_other_ones(
    header: bool, training: bool, tmp_path: Path
) -> None:
    served = Served(tmp_path, rollout_secret=(SECRET, OTHER_SECRET))

    def ask(rollout: str, token: str | None) -> int:
        segment = rollout if header or token is None else f"{rollout}~{token}"
        headers = [(b"X-Tokcap-Rollout-Token", token.encode())] if header and token is not None else []
        path = f"/ng-rollout/{segment}{TRAINING if training else ''}{CHAT}"
        return sent(served, path.encode(), headers)[0]

    assert ask("mine", rollout_token(SECRET, "mine")) == 200
    assert ask("mine", rollout_token(OTHER_SECRET, "mine")) == 200
    assert [ask("theirs", token) for token in (None, "", rollout_token(SECRET, "mine"))] == [403, 403, 403]
    assert len(served.reached) == 2
    for scope in served.reached:
        assert scope["path"] == CHAT
        assert not [name for name, _ in scope["headers"] if b"token" in name]
    assert served.written() == ["mine"]
    assert len(list(summaries(tmp_path / "calls", "mine"))) == 2
    if training:
        with FileStore(tmp_path / "store", read_only=True) as store:
            assert [call.outcome for call in store.read_now("mine").calls] == ["recorded"] * 2


def test_a_wrong_token_and_none_are_answered_alike_in_the_shape_of_the_route(tmp_path: Path) -> None:
    served = Served(tmp_path, rollout_secret=SECRET)
    told = {sent(served, f"/ng-rollout/{segment}{CHAT}".encode()) for segment in ("r-1", "r-1~", "r-1~x", "r-2~y")}
    ((status, body),) = told
    assert status == 403
    assert b'"message":"rollout token missing or wrong"' in body
    _, anthropic = sent(served, b"/ng-rollout/r-1/v1/messages")
    assert b'{"type":"error","error":{"type":"permission_error"' in anthropic
    assert served.written() == []


@pytest.mark.parametrize(
    ("port", "location", "shown"),
    [
        (8000, "/v1/x", True),
        (8000, "http://node:8000/v1/x", True),
        (8000, "http://10.0.0.1:8000/v1/x", True),
        (80, "http://10.0.0.1/v1/x", True),
        (8000, "http://10.0.0.1/v1/x", False),
        (8000, "http://node/v1/x", False),
        (8000, "http://10.0.0.1:9000/v1/x", False),
        (8000, "//other.test/v1/x", False),
        (8000, "http://node:8000@other.test/v1/x", False),
        (8000, "http://other.test\\@node:8000/v1/x", False),
        (8000, "https://node:8000.other.test/v1/x", False),
    ],
)
def test_a_redirect_takes_the_token_to_no_other_server(port: int, location: str, shown: bool) -> None:
    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 307, "headers": [(b"location", location.encode())]})
        await send({"type": "http.response.body", "body": b""})

    sent_: list[Any] = []

    async def send(message: Any) -> None:
        sent_.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    app = CaptureMiddleware(engine, {}, rollout_secret=SECRET)
    raw = f"/ng-rollout/r-1~{right_token('r-1')}/v1/models".encode()
    scope = {**security_urls.scope_of(raw, [(b"host", b"node:8000")]), "method": "GET", "server": ("10.0.0.1", port)}
    try:
        asyncio.run(app(scope, receive, send))
    finally:
        forget_filters()
    ((_, found),) = sent_[0]["headers"]
    assert found.decode() == (
        location.replace("/v1/x", f"/ng-rollout/r-1~{right_token('r-1')}/v1/x") if shown else location
    )


def test_requests_without_the_prefix_need_no_token(tmp_path: Path) -> None:
    served = Served(tmp_path, rollout_secret=SECRET)
    assert sent(served, CHAT.encode())[0] == 200


@pytest.mark.parametrize("header", [True, False])
def test_a_server_that_knows_no_secret_does_not_pass_a_token_as_if_it_was_checked(header: bool, tmp_path: Path) -> None:
    served, token = Served(tmp_path), right_token("r-1")
    headers = [(b"X-Tokcap-Rollout-Token", token.encode())] if header else []
    path = f"/ng-rollout/r-1{'' if header else f'~{token}'}{CHAT}"
    logger = logging.getLogger("uvicorn.access")
    try:
        status, body = sent(served, path.encode(), headers)
        record = logging.LogRecord(logger.name, 20, "", 0, "%s", (path,), None)
        assert logger.filter(record)  # before the server writes its line, with an answer that has begun
    finally:
        forget_filters()
    assert (status, served.reached) == (400, [])
    assert b"rollout_secret" in body
    assert token.encode() not in body
    assert token not in record.getMessage()


@pytest.mark.parametrize("base", ["http://h:8000", "http://h:8000/v1", "http://h/root/v1"])
@pytest.mark.parametrize("training", [True, False])
def test_the_base_url_of_a_rollout_holds_its_token(base: str, training: bool) -> None:
    token = rollout_token(SECRET, "r-1")
    assert token == right_token("r-1")
    assert len(token) == 32
    url = rollout_base_url(base, "r-1", training, secret=SECRET)
    assert url == rollout_base_url(base, "r-1", training, token=token)
    assert url.replace(f"~{token}", "") == rollout_base_url(base, "r-1", training)
    path = "/" + url.split("/", 3)[3].removeprefix("root/") + "/chat/completions"
    found = capture_url(security_urls.scope_of(path.encode()))
    assert found is not None
    assert (found.rollout_id, found.training, found.token) == ("r-1", training, token.encode())
    assert token not in repr(found)


@pytest.mark.parametrize(
    "given",
    [
        {"token": ""},
        {"token": "short"},
        {"token": "x" * 31 + "/"},
        {"token": "x" * 32 + "\n"},
        {"secret": "too short"},
        {"secret": b"bytes that are long enough"},
        {"secret": ""},
        {"secret": f"{SECRET}\n"},
        {"secret": 32 * "\udcff"},
        {"token": "x" * 32, "secret": SECRET},
    ],
)
def test_a_token_or_a_secret_that_can_be_none_is_refused_and_not_shown(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        rollout_base_url("http://h", "r-1", **given)
    assert not any(value and str(value) in str(caught.value) for value in given.values())
    with pytest.raises(InvalidIdError):
        rollout_token(SECRET, "r/1")


# ---- where the secret comes from


def accepts(token: str, tmp_path: Path, **settings: Any) -> bool:
    return sent(Served(tmp_path, **settings), f"/ng-rollout/r-1~{token}/v1/models".encode())[0] == 200


def test_secrets_come_from_a_setting_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = rollout_token(SECRET, "r-1"), rollout_token(OTHER_SECRET, "r-1")
    file = tmp_path / "secrets"
    file.write_text(f"{SECRET}\n\n  {OTHER_SECRET}  \r\n")
    file.chmod(0o600)
    for given in ({"rollout_secret": (SECRET, OTHER_SECRET)}, {"rollout_secret_file": str(file)}):
        assert accepts(new, tmp_path, **given)
        assert accepts(old, tmp_path, **given)
    assert not accepts(old, tmp_path, rollout_secret=SECRET)
    monkeypatch.setenv("TOKCAP_ROLLOUT_SECRET_FILE", str(file))
    assert accepts(old, tmp_path)
    monkeypatch.delenv("TOKCAP_ROLLOUT_SECRET_FILE")
    monkeypatch.setenv("TOKCAP_ROLLOUT_SECRET", f"{'k' * 16} {'l' * 16}")
    assert accepts(rollout_token("l" * 16, "r-1"), tmp_path)
    block = {"tokcap_serving": {"rollout_secret": "${oc.env:OF_RUN}"}}
    monkeypatch.setenv("OF_RUN", SECRET)
    assert serving_settings(block).rollout_secret == SECRET


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_secret": ""}, "rollout_secret is empty"),
        ({"rollout_secret": ()}, "rollout_secret is empty"),
        ({"rollout_secret": (SECRET, "")}, "rollout_secret is empty"),
        ({"rollout_secret": "fifteen letters"}, "shorter than 16 bytes"),
        ({"rollout_secret": (SECRET, "fifteen letters")}, "shorter than 16 bytes"),
        ({"rollout_secret": f"{SECRET}\n"}, "begins or ends with white space"),
        ({"rollout_secret": "fifteen letters" + 20 * "\udcff"}, "is no text in UTF-8"),
        ({"rollout_secret_file": ""}, "rollout_secret_file is empty"),
        ({"rollout_secret_file": "/no/such/file"}, "can't be read: No such file"),
        ({"rollout_secret_file": "EMPTY"}, "holds no secret"),
        ({"rollout_secret_file": "BYTES"}, "can't be read: it is no text"),
        ({"rollout_secret": 7}, "rollout_secret"),
    ],
)
def test_a_secret_that_is_none_keeps_the_server_from_starting_and_is_not_shown(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Above all one that is empty, as of a variable that isn't set: everybody would be let in."""
    (tmp_path / "EMPTY").write_text("\n \n")
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe\x00")
    path = settings.get("rollout_secret_file")
    if path in ("EMPTY", "BYTES"):
        settings = {"rollout_secret_file": str(tmp_path / str(path))}
    with pytest.raises(ConfigError, match=words) as caught:
        Served(tmp_path, **settings)
    assert "fifteen letters" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("TOKCAP_ROLLOUT_SECRET", ""), ("TOKCAP_ROLLOUT_SECRET", "   "), ("TOKCAP_ROLLOUT_SECRET_FILE", "")],
)
def test_an_empty_variable_is_no_permission(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is empty"):
        Served(tmp_path)


@pytest.mark.parametrize("name", ["rollout_secret", "rollout_secret_file"])
def test_a_setting_that_is_null_is_no_permission(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As YAML reads a line with nothing behind the colon. What the environment says holds, as without the line."""
    file = tmp_path / "secrets"
    file.write_text(SECRET)
    file.chmod(0o600)
    block = {"tokcap_serving": {name: None}}
    with pytest.raises(ConfigError, match=f"{name} is null"):
        serving_settings(block)
    value = str(file) if name == "rollout_secret_file" else "k" * 16
    other = {"tokcap_serving": {name: value}}
    assert getattr(serving_settings(other, **{name: None}), name) == value
    monkeypatch.setenv(f"TOKCAP_{name.upper()}", value)
    found = [getattr(serving_settings(each, **given), name) for each in (block, {}) for given in ({}, {name: None})]
    assert found == [(value,) if name == "rollout_secret" else value] * 4


def test_a_variable_of_bytes_that_are_no_text_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `?` for each byte anybody could make the tokens."""
    monkeypatch.setitem(os.environb, b"TOKCAP_ROLLOUT_SECRET", bytes(range(0xE0, 0x100)))
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        Served(tmp_path)


def test_a_file_of_secrets_that_everybody_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secrets"
    file.write_text(SECRET)
    for mode, warnings in ((0o644, 1), (0o600, 0), (0o640, 0)):
        file.chmod(mode)
        caplog.clear()
        Served(tmp_path, rollout_secret_file=str(file))
        assert caplog.text.count("is open to everybody") == warnings


# ---- what is shown


def test_settings_and_tokens_are_not_shown() -> None:
    settings = serving_settings({}, rollout_secret=(SECRET,), api_keys=["key-of-the-engine"])
    for shown in (repr(settings), str(settings), repr(settings.__rich_repr__())):
        assert "rollout_secret" in shown
        assert SECRET not in shown
        assert "key-of-the-engine" not in shown
    assert ServingSettings(engine="vllm").__rich_repr__()[0] == ("engine", "vllm")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/ng-rollout/r-1~abc/v1", "/ng-rollout/r-1~***/v1"),
        ("/ng-rollout/r-1%7Eabc", "/ng-rollout/r-1%7E***"),
        ("{'raw_path': b'/ng-rollout/r-1~abc'}", "{'raw_path': b'/ng-rollout/r-1~***'}"),
        ("/ng-rollout/r-1/v1?x=~abc", "/ng-rollout/r-1/v1?x=~abc"),
        ("/other~abc", "/other~abc"),
        ("/ng-rollout%2Fr-1~abc/ng-rollout/r-2~def/x", "/ng-rollout%2Fr-1~***/ng-rollout/r-2~***/x"),
    ],
)
def test_tokens_are_taken_out_of_a_text(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_access_logs_of_the_usual_servers_show_no_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As uvicorn writes them, whatever was configured of its loggers before."""
    Served(tmp_path, rollout_secret=SECRET)
    CaptureMiddleware(lambda *_: asyncio.sleep(0), {}, rollout_secret=SECRET)  # once, for any number
    path = f"/ng-rollout/r-1~{right_token('r-1')}/v1"
    logger = logging.getLogger("uvicorn.access")
    try:
        with caplog.at_level(logging.INFO, "uvicorn.access"):
            logger.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "POST", f"{path}?key=abc", "1.1", 200)
            logger.info("no arguments")
        assert [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"] == [
            '1.2.3.4:5 - "POST /ng-rollout/r-1~***/v1?key=abc HTTP/1.1" 200',
            "no arguments",
        ]
        assert sum(isinstance(each, WithoutTokens) for each in logger.filters) == 1
    finally:
        forget_filters()
