"""The small parts of the serving path: settings, what is known of a server, bodies, encodings, routes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap.asgi import ServingSettings
from tokcap.asgi.client import Client, ClientGoneError, decoded
from tokcap.asgi.coding import Coding
from tokcap.asgi.editing import encode_json, with_members
from tokcap.asgi.engines import Server, server_of, version_of
from tokcap.asgi.known import idempotency_key, is_multimodal, retry_count
from tokcap.asgi.policy import PolicyVersions
from tokcap.asgi.refusals import RefusalError
from tokcap.asgi.routes import Routes
from tokcap.asgi.settings import serving_settings
from tokcap.capture.shapes import decode_json
from tokcap.errors import ConfigError

# ---- settings


def test_settings_come_from_the_block_and_are_replaced_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret-key")
    config = {"env": {"nemo_gym": {"tokcap_serving": {"engine": "sglang", "api_keys": ["${oc.env:A_KEY}"]}}}}
    settings = serving_settings(config, engine="vllm", max_body_bytes=10)
    assert (settings.engine, settings.api_keys, settings.max_body_bytes) == ("vllm", ("secret-key",), 10)
    assert serving_settings({}) == ServingSettings()


def test_settings_come_from_the_file_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"tokcap_serving": {"engine": "tgi"}}))
    monkeypatch.setenv("TOKCAP_CONFIG", str(file))
    assert serving_settings().engine == "tgi"


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"engin": "vllm"}, "engin"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_body_bytes": "many"}, "max_body_bytes"),
        ({"prompt_memory_bytes": -1}, "prompt_memory_bytes"),
        ({"routes": {"/generate": "generating"}}, "/generate"),
        ({"routes": {"POST /x": "maybe"}}, "routes"),
        ({"dialects": "guess"}, "dialects"),
        ({"policy_version": [1]}, "policy_version"),
        ("vllm", "tokcap_serving"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(block: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        serving_settings({"tokcap_serving": block})


def test_no_message_shows_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        serving_settings({"tokcap_serving": {"api_keys": {"secret-key": 1}}})
    assert "secret-key" not in str(caught.value)


# ---- the server


def vllm_app(**arguments: Any) -> Any:
    """An application with the state that vLLM gives it."""
    model_config = types.SimpleNamespace(
        logprobs_mode="processed_logprobs", get_diff_sampling_param=lambda: {"temperature": 0.6}
    )
    state = types.SimpleNamespace(
        args=types.SimpleNamespace(**arguments),
        vllm_config=types.SimpleNamespace(model_config=model_config),
        engine_client=object(),
    )
    return types.SimpleNamespace(state=state)


def test_vllm_tells_its_version_keys_and_sampling_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0+cpu"))
    server = server_of(vllm_app(api_key=["k1", "k2"]), ServingSettings())
    assert (server.engine, server.numbers, server.logprobs_mode) == ("vllm", (0, 32, 0), "processed_logprobs")
    assert server.sampling_defaults == {"temperature": 0.6}
    assert server.admits([(b"authorization", b"Bearer k2")])
    assert server.admits([(b"x-api-key", b"k1")])
    for headers in ([], [(b"authorization", b"Basic k1")], [(b"authorization", b"Bearer k3")], [(b"x-api-key", b"")]):
        assert not server.admits(headers)


def test_the_key_of_the_environment_counts_only_without_one_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.SimpleNamespace(__version__="0.32.0", envs=types.SimpleNamespace(VLLM_API_KEY="from-env"))
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert server_of(vllm_app(api_key=None), ServingSettings()).keys == (hashlib.sha256(b"from-env").digest(),)
    assert server_of(vllm_app(api_key=["k"]), ServingSettings()).keys == (hashlib.sha256(b"k").digest(),)


def test_an_unknown_application_is_what_the_settings_say() -> None:
    settings = ServingSettings(engine="sglang", engine_version="0.5.20", logprobs_mode="processed_logprobs")
    server = server_of(None, settings)
    assert (server.engine, server.numbers, server.logprobs_mode) == ("sglang", (0, 5, 20), "processed_logprobs")
    assert server_of(object(), ServingSettings()) == Server(logprobs_mode="unknown")
    assert Server().admits([])


def test_a_model_configuration_that_fails_costs_nothing() -> None:
    app = vllm_app(api_key=None)
    app.state.vllm_config.model_config.get_diff_sampling_param = lambda: 1 / 0
    assert server_of(app, ServingSettings(sampling_defaults={"top_p": 0.9})).sampling_defaults == {"top_p": 0.9}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.0.post2+cpu", (0, 32, 0)), ("v0.5.23", (0, 5, 23)), ("main", ()), ("", ()), ("0.33.0rc1", (0, 33, 0))],
)
def test_versions_are_read_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_of(text) == numbers


# ---- policy versions


def test_the_policy_version_is_read_again_when_its_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "version"
    versions = PolicyVersions(ServingSettings(policy_version_file=str(file)))
    assert versions.now() is None
    file.write_text("step-7\n")
    assert versions.now() == "step-7"
    replacement = tmp_path / "next"
    replacement.write_text("step-8\n")
    replacement.replace(file)
    assert versions.now() == "step-8"


def test_a_policy_version_function_that_fails_costs_no_answer() -> None:
    assert PolicyVersions(ServingSettings(policy_version=lambda: 1 / 0)).now() is None
    assert PolicyVersions(ServingSettings(policy_version=lambda: 7)).now() == 7
    assert PolicyVersions(ServingSettings(policy_version="v3")).now() == "v3"


# ---- routes


@pytest.mark.parametrize(
    ("method", "path", "engine", "may_generate", "known"),
    [
        ("POST", "/v1/chat/completions", "vllm", True, True),
        ("POST", "/v1/chat/completions/", "vllm", True, True),
        ("POST", "/v1/messages", "", True, True),
        ("POST", "/inference/v1/generate", "vllm", True, True),
        ("POST", "/inference/v1/generate", "sglang", True, False),
        ("POST", "/generate", "sglang", True, True),
        ("PUT", "/generate", "sglang", True, True),
        ("PUT", "/v1/chat/completions", "vllm", False, True),
        ("POST", "/", "tgi", True, True),
        ("POST", "/", "vllm", False, True),
        ("POST", "/", "", False, True),
        ("POST", "/my/own", "vllm", True, False),
        ("POST", "/v1/messages/count_tokens", "vllm", False, True),
        ("POST", "/tokenize", "", False, True),
        ("POST", "/v1/responses/resp_1/cancel", "vllm", False, True),
        ("GET", "/v1/responses/resp_1", "vllm", False, True),
        ("GET", "/v1/models", "vllm", False, True),
        ("GET", "/my/own", "vllm", False, True),
        ("HEAD", "/v1/chat/completions", "vllm", False, True),
        ("OPTIONS", "/v1/chat/completions", "vllm", False, True),
    ],
)
def test_the_tables_say_what_may_generate(method: str, path: str, engine: str, may_generate: bool, known: bool) -> None:
    route = Routes().find(method, path, engine)
    assert (route.may_generate, route.known) == (may_generate, known)


def test_the_configuration_adds_to_the_tables() -> None:
    routes = Routes({"POST /my/own": "generating", "POST /v1/completions/": "other", "GET /sample": "generating"})
    assert routes.find("POST", "/my/own/", "vllm").known
    assert not routes.find("POST", "/v1/completions", "vllm").may_generate
    assert routes.find("GET", "/sample", "").may_generate


# ---- what headers and bodies tell


def test_retries_are_counted_as_the_official_clients_tell() -> None:
    assert retry_count([(b"x-stainless-retry-count", b"2")]) == 2
    for value in (b"", b"-1", b"two", b"9" * 30, b"1.0"):
        assert retry_count([(b"x-stainless-retry-count", value)]) == 0
    assert retry_count([(b"x-stainless-retry-count", b"9999999999")]) == 2**31 - 1
    assert idempotency_key([(b"idempotency-key", b"k" * 1000)]) == "k" * 200


@pytest.mark.parametrize(
    ("request_body", "media"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, True),
        ({"messages": [{"role": "tool", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, True),
        ({"input": [{"type": "input_image"}]}, True),
        ({"text": "x", "image_data": ["u"]}, True),
        ({"messages": 7, "input": None}, False),
        ({"messages": [7, None, {"content": {"type": "image"}}]}, False),
        (None, False),
    ],
)
def test_media_in_a_request_are_seen(request_body: dict[str, Any] | None, media: bool) -> None:
    assert is_multimodal(request_body) is media


# ---- editing JSON

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


@given(objects, objects)
def test_members_are_set_and_everything_else_stays(request_body: dict[str, Any], members: dict[str, Any]) -> None:
    body = json.dumps(request_body, indent=1).encode()
    edited = with_members(body, request_body, members)
    assert json.loads(edited) == {**request_body, **members}
    if not set(members) & set(request_body):
        assert edited.endswith(body.lstrip()[1:])  # the client's own bytes


@pytest.mark.parametrize(
    "document",
    [
        b'{"a":NaN,"b":[-Infinity,1]}',
        b'{"a":123456789012345678901234567890}',
        b'{"a":"\\ud800"}',
        b'{"a":1e-7,"b":1.0,"c":-0.0,"d":"\xc3\xa4"}',
    ],
)
def test_what_was_decoded_is_encoded_equal(document: bytes) -> None:
    again = json.loads(encode_json(decode_json(document), document))
    assert repr(again) == repr(json.loads(document))


# ---- the body of a request


def client_of(*messages: dict[str, Any]) -> Client:
    pending = list(messages)

    async def receive() -> dict[str, Any]:
        while not pending:
            await asyncio.sleep(3600)
        return pending.pop(0)

    return Client(receive)


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_many_messages_is_read_whole_and_handed_out_once() -> None:
    async def run() -> None:
        client = client_of(part(b"ab", True), part(b"", True), part(b"c"), {"type": "http.disconnect"})
        assert await client.read([], 3) == b"abc"
        before = client.body_taken
        client.listen()
        assert await client.receive() == part(b"abc")
        assert (before, client.body_taken) == (False, True)
        assert await client.receive() == {"type": "http.disconnect"}
        assert client.gone
        client.close()

    asyncio.run(run())


def test_a_disconnect_after_the_answer_is_none() -> None:
    async def run() -> None:
        client = client_of(part(b""), {"type": "http.disconnect"})
        await client.read([], 3)
        client.listen()
        client.end()
        assert await client.receive() == part(b"")
        assert await client.receive() == {"type": "http.disconnect"}
        client.close()
        assert not client.gone

    asyncio.run(run())


def test_a_declared_length_above_the_limit_is_refused_before_anything_is_read() -> None:
    async def run() -> None:
        client = client_of()
        with pytest.raises(RefusalError) as caught:
            await client.read([(b"content-length", b"4")], 3)
        assert caught.value.status == 413

    asyncio.run(run())


def test_a_body_that_grows_above_the_limit_is_refused_and_can_be_replayed() -> None:
    async def run() -> None:
        client = client_of(part(b"ab", True), part(b"cd", True), part(b"e"))
        with pytest.raises(RefusalError):
            await client.read([], 3)
        replayed = [await client.replay() for _ in range(3)]
        assert replayed == [part(b"ab", True), part(b"cd", True), part(b"e")]

    asyncio.run(run())


def test_a_client_that_leaves_before_its_body_is_whole_is_told() -> None:
    async def run() -> None:
        with pytest.raises(ClientGoneError):
            await client_of(part(b"ab", True), {"type": "http.disconnect"}).read([], 9)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        (b"gzip", gzip.compress),
        (b"x-gzip", gzip.compress),
        (b"deflate", zlib.compress),
        (b"deflate", lambda data: zlib.compress(data)[2:-4]),
        (b"identity", bytes),
        (b"", bytes),
        (b"gzip, deflate", lambda data: zlib.compress(gzip.compress(data))),
        (b"gzip", lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:])),
    ],
)
def test_a_compressed_request_is_decoded(encoding: bytes, encode: Any) -> None:
    assert decoded(encode(b'{"a":1}'), encoding, 100) == b'{"a":1}'


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        (b"br", b"x", 415),
        (b"gzip", b"no gzip", 400),
        (b"gzip", gzip.compress(b"x" * 50)[:-9], 400),
        (b"gzip", gzip.compress(bytes(10**6)), 413),
        (b"deflate", zlib.compress(bytes(10**6)), 413),
        (b"gzip", gzip.compress(bytes(60)) + gzip.compress(bytes(60)), 413),
        (b"gzip,gzip", gzip.compress(gzip.compress(bytes(10**6))), 413),
    ],
    ids=["unknown", "no gzip", "cut", "bomb", "deflated bomb", "two members", "twice"],
)
def test_what_can_not_be_decoded_within_the_limit_is_refused(encoding: bytes, body: bytes, status: int) -> None:
    with pytest.raises(RefusalError) as caught:
        decoded(body, encoding, 100)
    assert caught.value.status == status


@pytest.mark.parametrize("name", [b"gzip", b"deflate", b"", b"identity"])
def test_an_encoded_answer_is_read_and_encoded_again_so_that_every_piece_can_be_read_at_once(name: bytes) -> None:
    first, reader = Coding(name), Coding(name)
    pieces = [first.encode(data, last=last) for data, last in ((b"ab", False), (b"", False), (b"c", True))]
    assert [reader.decode(piece) for piece in pieces] == [b"ab", b"", b"c"]


def test_an_answer_that_is_not_of_its_encoding_is_an_error() -> None:
    with pytest.raises(ValueError, match="content-encoding"):
        Coding(b"gzip").decode(b"no gzip at all")
    assert not Coding(b"br").known
