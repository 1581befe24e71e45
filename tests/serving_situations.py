"""All situations of serving that can be played over any transport: in process, with two workers, through the proxy."""

from __future__ import annotations

from tests import serving_answers, serving_asks, serving_ends, serving_records, serving_requests, serving_views
from tests.serving_steps import SITUATIONS, Situation
from tests.serving_views import PAIRS, Pair, see_no_difference

__all__ = ("MODULES", "PAIRS", "SITUATIONS", "Pair", "Situation", "see_no_difference")

MODULES = (serving_answers, serving_ends, serving_asks, serving_views, serving_requests, serving_records)
"""Where they stand: importing them puts them on the list."""
