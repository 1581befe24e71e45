"""Rule 27: a run that delivers too little stops, and says why."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokcap.config import TokenIdCaptureConfig
from tokcap.delivery import MaskGuard
from tokcap.errors import ConfigError, InvalidOptionError, MaskFractionError


def test_rule_27_the_run_stops_above_the_limit_with_counts_per_reason() -> None:
    guard = MaskGuard(0.25, min_samples=8)
    for _ in range(5):
        guard.observe(False)
    guard.observe(True, ("nothing_recorded", "lost_call"))
    guard.observe(True, ["nothing_recorded"])
    with pytest.raises(MaskFractionError) as raised:
        guard.observe(True)
    for part in ("3 of 8", "37.5%", "0.25", "nothing_recorded: 2", "lost_call: 1", "no reason given: 1"):
        assert part in str(raised.value)
    assert (guard.samples, guard.masked, guard.fraction) == (8, 3, 0.375)
    assert guard.counts == {"nothing_recorded": 2, "lost_call": 1, "no reason given": 1}


def test_rule_27_the_limit_itself_and_too_few_samples_do_not_stop() -> None:
    guard = MaskGuard(0.5, min_samples=4)
    for _ in range(3):
        guard.observe(True, ("drift",))
    guard = MaskGuard(0.5, min_samples=2)
    for masked in (True, False, False, True):
        guard.observe(masked, ("drift",))
    with pytest.raises(MaskFractionError):
        guard.observe(True, ("drift",))


def test_an_unmasked_rollout_stops_the_run_if_with_it_there_are_enough_samples() -> None:
    guard = MaskGuard(0.5, min_samples=3)
    guard.observe(True, ("drift",))
    guard.observe(True, ("drift",))
    with pytest.raises(MaskFractionError):
        guard.observe(False)


def test_without_a_limit_it_only_counts() -> None:
    guard = MaskGuard(None, min_samples=1)
    assert guard.fraction == 0.0
    for _ in range(100):
        guard.observe(True, ("drift", "drift"))
    assert guard.counts == {"drift": 100}


@pytest.mark.parametrize("fraction", [1.5, -0.1, float("nan"), "0.5", True, False, [0.5], 1j])
def test_a_fraction_that_cannot_be_is_refused(fraction: Any) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        MaskGuard(fraction, 1)
    assert str(raised.value) == f"max_mask_fraction is {fraction!r}, expected None or a number from 0 to 1"


@pytest.mark.parametrize("samples", [0, -1, True, "x", 1.5, None])
def test_a_number_of_samples_that_cannot_be_is_refused(samples: Any) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        MaskGuard(0.5, samples)
    assert str(raised.value) == f"min_samples is {samples!r}, expected a whole number from 1"


@pytest.mark.parametrize("fraction", [0, 1, 0.5, Fraction(1, 4), np.float32(0.25)])
def test_a_fraction_may_be_any_real_number(fraction: Any) -> None:
    guard = MaskGuard(fraction, 1)
    if fraction < 1:
        with pytest.raises(MaskFractionError, match="max_mask_fraction=0"):
            guard.observe(True)


def test_the_configured_guard_has_the_limits_of_the_block(tmp_path: Path) -> None:
    block: dict[str, Any] = {
        "enabled": True,
        "dir": str(tmp_path / "store"),
        "max_mask_fraction": 0.125,
        "mask_fraction_min_samples": 7,
    }
    for config in ({"token_id_capture": block}, TokenIdCaptureConfig(token_id_capture=block)):  # type: ignore[arg-type]
        guard = MaskGuard.from_config(config)
        assert (guard.max_mask_fraction, guard.min_samples) == (0.125, 7)
    assert MaskGuard.from_config(None).max_mask_fraction is None
    with pytest.raises(ConfigError):
        MaskGuard.from_config({"token_id_capture": {"max_mask_fraction": 2}})
