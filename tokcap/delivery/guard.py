"""When too many rollouts deliver nothing, the run stops (rule 27)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from numbers import Real
from typing import Any, Self

from ..errors import InvalidOptionError, MaskFractionError

__all__ = ("MaskGuard",)


class MaskGuard:
    """Counts finished rollouts and those that are masked.

    max_mask_fraction: from 0 to 1; the run stops if a larger part is masked. None: only count.
    min_samples: how many finished rollouts it takes before the limit applies.
    Raises `InvalidOptionError` for other values.
    """

    def __init__(self, max_mask_fraction: float | None, min_samples: int = 50) -> None:
        part: object = max_mask_fraction
        number = isinstance(part, Real) and not isinstance(part, bool)
        if max_mask_fraction is not None and not (number and 0 <= max_mask_fraction <= 1):
            raise InvalidOptionError(f"max_mask_fraction is {part!r}, expected None or a number from 0 to 1")
        count: object = min_samples
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidOptionError(f"min_samples is {min_samples!r}, expected a whole number from 1")
        self.max_mask_fraction = None if max_mask_fraction is None else float(max_mask_fraction)
        self.min_samples = min_samples
        self.samples = 0
        self.masked = 0
        self.counts: Counter[str] = Counter()
        """Masked rollouts per reason; one may have several."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """With `max_mask_fraction` and `mask_fraction_min_samples` of the block.

        Takes what `tokcap.config.token_id_capture_config` takes, and raises what that raises.
        """
        from ..config import token_id_capture_config

        block = token_id_capture_config(config).token_id_capture
        return cls(block.max_mask_fraction, block.mask_fraction_min_samples)

    @property
    def fraction(self) -> float:
        """The part of the finished rollouts that is masked; 0.0 before the first."""
        return self.masked / self.samples if self.samples else 0.0

    def observe(self, masked: bool, reasons: Iterable[str] = ()) -> None:
        """One finished rollout. `masked` only if it delivers no trainable token at all.

        Raises `MaskFractionError` at each rollout for which at least `min_samples` are counted and the masked part is
        above the limit.
        """
        self.samples += 1
        if masked:
            self.masked += 1
            self.counts.update(set(reasons) or {"no reason given"})
        if self.max_mask_fraction is None or self.samples < self.min_samples or self.fraction <= self.max_mask_fraction:
            return
        told = ", ".join(f"{reason}: {count}" for reason, count in self.counts.most_common())
        raise MaskFractionError(
            f"{self.masked} of {self.samples} finished rollouts ({self.fraction:.1%}) deliver no trainable token, more "
            f"than max_mask_fraction={self.max_mask_fraction:g} allows. Per reason: {told}. Their evidence is kept"
        )
