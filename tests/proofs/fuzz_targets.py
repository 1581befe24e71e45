"""All targets, by group: what one child process fuzzes one after another shares its imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import fuzz_answers, fuzz_configs, fuzz_records, fuzz_requests, fuzz_rollouts, fuzz_upstream
from .fuzz_input import Target

__all__ = ("CORPUS", "GROUPS", "TARGETS", "corpus_of")

GROUPS: Mapping[str, tuple[Target, ...]] = {
    "records": fuzz_records.TARGETS,
    "rollouts": fuzz_rollouts.TARGETS,
    "configs": fuzz_configs.TARGETS,
    "answers": fuzz_answers.TARGETS,
    "requests": fuzz_requests.TARGETS,
    "upstream": fuzz_upstream.TARGETS,
}

TARGETS: Mapping[str, Target] = {target.name: target for targets in GROUPS.values() for target in targets}

CORPUS = Path(__file__).parents[1] / "corpus"
"""Inputs that were found, in a directory for each target; each is named after what it is."""


def corpus_of(name: str) -> list[Path]:
    """The inputs that are kept of one target."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())
