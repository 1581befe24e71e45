"""One call that checks any sink and source pair against what tokcap promises, for people who write a transport.

    report = await check(lambda: MySink(url), lambda: MySource(url), crash=kill)
    assert report.ok, str(report)

Every check is a small function named after the behaviour that it checks; a failure says what was done, what was
expected, what was seen and which rule that breaks. The kit uses nothing but the protocols: `TokenSink`, `TokenSource`,
their optional methods and the attributes of a snapshot.
"""

from __future__ import annotations

from .kit import Crash, SinkFactory, SourceFactory
from .report import Report
from .runner import check, check_names

__all__ = ("Crash", "Report", "SinkFactory", "SourceFactory", "check", "check_names")
