"""The list of checks: each one a function, the rule that it checks and what it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from .kit import Kit

__all__ = ("CHECKS", "Check", "Need", "behaviour")

Need = Literal["begin_call", "settle_call", "put_many", "reset", "crash"]
"""An optional method of the sink (`reset`: of the source or the sink), or the crash hook."""


@dataclass(frozen=True)
class Check:
    """One behaviour that a sink and source pair has or hasn't."""

    name: str
    rule: str
    needs: tuple[Need, ...]
    run: Callable[[Kit], Awaitable[None]]


CHECKS: list[Check] = []


def behaviour(
    rule: str, *needs: Need
) -> Callable[[Callable[[Kit], Awaitable[None]]], Callable[[Kit], Awaitable[None]]]:
    """Add a function to the checks, under its own name. `rule` ends every failure text of it."""

    def add(run: Callable[[Kit], Awaitable[None]]) -> Callable[[Kit], Awaitable[None]]:
        CHECKS.append(Check(name=run.__name__, rule=rule, needs=needs, run=run))
        return run

    return add
