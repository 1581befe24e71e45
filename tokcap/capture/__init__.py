"""The capture point: what a model server calls around one generation, so that nothing it samples is lost unseen."""

from __future__ import annotations

from .call import captured_call
from .context import CaptureContext, current_capture_context, reset_capture_context, set_capture_context
from .point import capture_parsed, capture_tokens, commit_entry, note_delivery, register_call_intent, settle

__all__ = (
    "CaptureContext",
    "capture_parsed",
    "capture_tokens",
    "captured_call",
    "commit_entry",
    "current_capture_context",
    "note_delivery",
    "register_call_intent",
    "reset_capture_context",
    "set_capture_context",
    "settle",
)
