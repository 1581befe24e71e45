"""What the headers and the body of a request tell of the call beside its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .interface import Headers

__all__ = ("idempotency_key", "is_multimodal", "retry_count")


_MEDIA = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "document")
_LONGEST_KEY = 200


def retry_count(headers: Headers) -> int:
    """How often the client has sent this before, as the official clients tell; 0 if it doesn't."""
    text = _header(headers, b"x-stainless-retry-count")
    return min(int(text), 2**31 - 1) if text.isdigit() and len(text) < 11 else 0


def idempotency_key(headers: Headers) -> str:
    """What the client names the request by, whatever often it sends it; empty without."""
    return _header(headers, b"idempotency-key")[:_LONGEST_KEY].decode("latin-1")


def is_multimodal(request: Mapping[str, Any] | None) -> bool:
    """Whether media are among the parts of the messages, or stand beside a prompt."""
    if request is None:
        return False
    if any(request.get(key) for key in ("image_data", "audio_data", "video_data")):
        return True
    for key in ("messages", "input"):
        turns = request.get(key)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and _holds_media(turn):
                return True
    return False


def _holds_media(part: dict[str, Any]) -> bool:
    if part.get("type") in _MEDIA:
        return True
    content = part.get("content")
    return isinstance(content, list) and any(isinstance(each, dict) and _holds_media(each) for each in content)


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")
