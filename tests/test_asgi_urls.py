"""Capture URLs: what is read of them, what is taken off, and what leads back through them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap.asgi import rollout_base_url
from tokcap.asgi.urls import capture_url, may_be_captured
from tokcap.errors import InvalidIdError, InvalidOptionError

TRAINING = "/training-token-capture"


def scope_of(raw: str, root_path: str = "", **changes: Any) -> dict[str, Any]:
    """An HTTP scope as uvicorn makes it."""
    return {
        "type": "http",
        "method": "POST",
        "path": unquote(raw),
        "raw_path": raw.encode(),
        "root_path": root_path,
        **changes,
    }


def stripped(raw: str, root_path: str = "", **changes: Any) -> tuple[str, bool, str, bytes]:
    scope = scope_of(raw, root_path, **changes)
    url = capture_url(scope)
    assert url is not None
    inner = url.stripped(scope)
    return url.rollout_id, url.training, inner["path"], inner["raw_path"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("/ng-rollout/r-1/v1/models", ("r-1", False, "/v1/models", b"/v1/models")),
        (f"/ng-rollout/r-1{TRAINING}/v1/models", ("r-1", True, "/v1/models", b"/v1/models")),
        ("/ng-rollout/r-1", ("r-1", False, "/", b"/")),
        ("/ng-rollout/r-1/", ("r-1", False, "/", b"/")),
        (f"/ng-rollout/r-1{TRAINING}", ("r-1", True, "/", b"/")),
        (f"/ng-rollout/r-1{TRAINING}/", ("r-1", True, "/", b"/")),
        (f"/ng-rollout/r-1{TRAINING}x/y", ("r-1", False, f"{TRAINING}x/y", f"{TRAINING}x/y".encode())),
        ("/ng-rollout/%72-1/v1", ("r-1", False, "/v1", b"/v1")),
        ("/ng-rollout/r-1//v1//x", ("r-1", False, "//v1//x", b"//v1//x")),
        ("/ng-rollout/a/ng-rollout/b/v1", ("a", False, "/ng-rollout/b/v1", b"/ng-rollout/b/v1")),
        (
            f"/ng-rollout/a{TRAINING}{TRAINING}/v1",
            ("a", True, f"{TRAINING}/v1", f"{TRAINING}/v1".encode()),
        ),
        ("/ng-rollout/r-1/a%2Fb/%C3%A4?", ("r-1", False, "/a/b/ä", b"/a%2Fb/%C3%A4")),
    ],
)
def test_one_level_of_the_prefix_is_stripped_and_the_encoding_of_the_rest_is_kept(
    raw: str, expected: tuple[str, bool, str, bytes]
) -> None:
    path, _, _ = raw.partition("?")
    assert stripped(path) == expected


@given(st.text(min_size=0, max_size=30), st.booleans())
def test_whatever_stands_behind_the_prefix_arrives_as_it_was_sent(rest: str, training: bool) -> None:
    sent = "/" + quote(rest.encode("utf-8", "replace"), safe="/~!$&'()*+,;=:@")
    path_of_prefix = "/ng-rollout/id.1" + (TRAINING if training else "")
    scope = scope_of(path_of_prefix + sent)
    url = capture_url(scope)
    assert url is not None
    assert url.rollout_id == "id.1"
    if not training and (sent + "/").startswith(TRAINING + "/"):
        return
    assert url.training is training
    inner = url.stripped(scope)
    assert (inner["raw_path"], inner["path"]) == (sent.encode(), unquote(sent))
    assert scope["path"] == unquote(path_of_prefix + sent)  # the given scope stays as it is


@pytest.mark.parametrize(
    "raw",
    [
        "/ng-rollout/",
        "/ng-rollout//v1",
        "/ng-rollout/a%2Fb/v1",
        "/ng-rollout/..%2f..%2fetc/v1",
        "/ng-rollout/../v1",
        "/ng-rollout/.hidden/v1",
        "/ng-rollout/a b/v1",
        "/ng-rollout/a%00b/v1",
        "/ng-rollout/a%0A/v1",
        "/ng-rollout/%FF/v1",
        "/ng-rollout/%D0%B0bc/v1",
        f"/ng-rollout/{'x' * 201}/v1",
        f"/ng-rollout/{'x' * 10_000}/v1",
        f"/ng-rollout/{'%78' * 1_000}/v1",
        "/%6eg-rollout/abc/v1",
        "/ng-rollout%2Fabc/v1",
    ],
)
def test_bad_ids_and_an_encoded_prefix_are_refused(raw: str) -> None:
    with pytest.raises(InvalidIdError):
        capture_url(scope_of(raw))


@pytest.mark.parametrize(
    "raw", ["/", "/v1/models", "/v1/ng-rollout/x", "/ng-rollout", "/ng-rolloutx/a", "//ng-rollout/a"]
)
def test_other_paths_are_no_capture_urls(raw: str) -> None:
    assert capture_url(scope_of(raw)) is None


def test_paths_without_the_word_are_told_by_one_look() -> None:
    assert not may_be_captured(scope_of("/v1/chat/completions"))
    assert may_be_captured(scope_of("/ng-rollout/a/v1"))


def test_the_prefix_stands_behind_the_root_path_wherever_the_server_leaves_that() -> None:
    # uvicorn leaves it in both, so do frameworks that mount applications
    assert stripped("/api/ng-rollout/r/v1/x", "/api") == ("r", False, "/api/v1/x", b"/api/v1/x")
    # a reverse proxy took it off before
    assert stripped("/ng-rollout/r/v1/x", "/api") == ("r", False, "/v1/x", b"/v1/x")
    # older frameworks take it off the decoded path only
    mixed = scope_of("/api/ng-rollout/r/v1/x", "/api", path="/ng-rollout/r/v1/x")
    url = capture_url(mixed)
    assert url is not None
    inner = url.stripped(mixed)
    assert (inner["path"], inner["raw_path"]) == ("/v1/x", b"/api/v1/x")
    # sent with another encoding
    assert stripped("/%61pi/ng-rollout/r/v1", "/api") == ("r", False, "/api/v1", b"/%61pi/v1")
    assert capture_url(scope_of("/apis/ng-rollout/r/v1", "/api")) is None


def test_servers_without_raw_path_are_served_too() -> None:
    scope = scope_of("/ng-rollout/r/v1/a b")
    del scope["raw_path"]
    url = capture_url(scope)
    assert url is not None
    assert url.stripped(scope)["path"] == "/v1/a b"


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (b"/v1/models", b"/ng-rollout/r/v1/models"),
        (b"/v1/models?x=1#y", b"/ng-rollout/r/v1/models?x=1#y"),
        (b"http://host:80/v1/a%2Fb", b"http://host:80/ng-rollout/r/v1/a%2Fb"),
        (b"http://elsewhere/v1/models", b"http://elsewhere/v1/models"),
        (b"//elsewhere/v1", b"//elsewhere/v1"),
        (b"models", b"models"),
        (b"../x", b"../x"),
        (b"/ng-rollout/r/v1/models", b"/ng-rollout/r/v1/models"),
        (b"/ng-rollout/r2/v1", b"/ng-rollout/r/ng-rollout/r2/v1"),
        (b"", b""),
        (b"http://[broken", b"http://[broken"),
    ],
)
def test_a_redirect_leads_through_the_prefix_again_unless_it_leads_elsewhere(location: bytes, expected: bytes) -> None:
    url = capture_url(scope_of("/ng-rollout/r/v1/models/"))
    assert url is not None
    assert url.location(location, [b"host:80"]) == expected


def test_a_redirect_of_a_mounted_application_keeps_root_and_prefix() -> None:
    url = capture_url(scope_of(f"/api/ng-rollout/r{TRAINING}/v1/", "/api"))
    assert url is not None
    assert url.location(b"/api/v1", []) == f"/api/ng-rollout/r{TRAINING}/v1".encode()


@pytest.mark.parametrize(
    ("base", "options", "expected"),
    [
        ("http://h:8000", {}, f"http://h:8000/ng-rollout/r{TRAINING}"),
        ("http://h:8000/", {}, f"http://h:8000/ng-rollout/r{TRAINING}"),
        ("http://h:8000", {"training": False}, "http://h:8000/ng-rollout/r"),
        ("http://h:8000/v1", {}, f"http://h:8000/ng-rollout/r{TRAINING}/v1"),
        ("http://h:8000/v1/", {"training": False}, "http://h:8000/ng-rollout/r/v1"),
        ("http://h:8000", {"openai": True}, f"http://h:8000/ng-rollout/r{TRAINING}/v1"),
        ("http://h:8000/v1", {"openai": False}, f"http://h:8000/ng-rollout/r{TRAINING}"),
        ("https://h/root", {}, f"https://h/root/ng-rollout/r{TRAINING}"),
        ("https://h/root/v1", {}, f"https://h/root/ng-rollout/r{TRAINING}/v1"),
    ],
)
def test_the_base_url_puts_the_prefix_before_the_version(base: str, options: dict[str, Any], expected: str) -> None:
    assert rollout_base_url(base, "r", **options) == expected


@pytest.mark.parametrize(
    "base", ["h:8000", "ftp://h", "", "http://", "http://h?x=1", "http://h#x", "http://h/ng-rollout/a", "http://[x"]
)
def test_a_base_that_can_be_none_is_refused(base: str) -> None:
    with pytest.raises(InvalidOptionError):
        rollout_base_url(base, "r")


def test_the_base_url_of_a_bad_id_is_refused() -> None:
    with pytest.raises(InvalidIdError):
        rollout_base_url("http://h", "a/b")
