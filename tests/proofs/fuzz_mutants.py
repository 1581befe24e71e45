"""Readers with a check taken out: what each of them lets through, the search has to find."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast

from tokcap import content, ids
from tokcap.asgi import client, coding, whole
from tokcap.capture.shapes import events, joiner
from tokcap.config import arguments
from tokcap.serve import connection, proxied
from tokcap.store import buffers, frame, ledger, log, manifest, notes, records, scan

__all__ = ("MUTANTS", "Mutant")


class Mutant(NamedTuple):
    """A check that is missing, and the target or the bomb that must notice."""

    found_by: str
    changes: tuple[tuple[Callable[..., Any], str, str], ...]
    """Function, a part of its text, and what stands there instead."""

    def apply(self) -> None:
        """Take the check out, in this process: whoever holds the function gets the other code."""
        texts: dict[Callable[..., Any], str] = {}
        for function, old, new in self.changes:
            text = texts.get(function) or textwrap.dedent(inspect.getsource(function))
            while text.startswith("@"):
                text = text.partition("\n")[2]
            if text.count(old) != 1:
                raise ValueError(f"{old!r} stands {text.count(old)} times in {function.__qualname__}")
            texts[function] = text.replace(old, new)
        for function, text in texts.items():
            assert isinstance(function, FunctionType)
            made: dict[str, Any] = {}
            code = "from __future__ import annotations\n" + text
            exec(compile(code, function.__code__.co_filename, "exec"), function.__globals__, made)
            function.__code__ = made[function.__name__].__code__


def _inner(found: Any) -> Callable[..., Any]:
    """The function of a property, or below a decorator."""
    function: Any = found.fget if isinstance(found, property) else found.__wrapped__
    return cast(Callable[..., Any], function)


_EXPERTS = _inner(inspect.getattr_static(records.StoredEntry, "routed_experts"))
_EXTENT = _inner(arguments._Extent.inside)


MUTANTS: dict[str, Mutant] = {
    "checksum-of-bodies": Mutant(
        "frames",
        ((scan._Reader._take_whole, "            or crc32(view[body:end], seed) != body_crc\n", ""),),
    ),
    "checksum-of-headers": Mutant(
        "frames",
        (
            (
                scan._Reader._take_whole,
                "or crc32(view[offset : body - 4], (header_seed + offset) & 0xFFFFFFFF) != header_crc",
                "",
            ),
            (
                frame.header_at,
                " or _CRC.unpack_from(head, 28)[0] != zlib.crc32(head[:28], _placed(seed, offset))",
                "",
            ),
        ),
    ),
    "length-of-frames": Mutant(
        "frames",
        (
            (scan._Reader._take_whole, "or end > limit\n", "\n"),
            (scan._Reader._take, "if frame.body_end > self.limit:", "if False:"),
        ),
    ),
    "types-of-arrays": Mutant(
        "bodies",
        ((records.StoredEntry.__init__, "0 <= floats <= 2 and 0 <= first <= 2 and 0 <= second <= 2 and ", ""),),
    ),
    "lengths-of-arrays": Mutant("bodies", ((records.StoredEntry.__init__, "if size > len(arrays):", "if False:"),)),
    "shape-of-experts": Mutant(
        "bodies",
        ((_EXPERTS, "except Exception as error:", "except OSError as error:"),),
    ),
    "types-of-contents": Mutant(
        "bodies", ((records.decode_contents, "tuple(map(type, found)) not in _CONTENT_TYPES", "False"),)
    ),
    "items-of-contents": Mutant("bodies", ((records.decode_contents, "(msgspec.DecodeError, TypeError)", "OSError"),)),
    "request-digests": Mutant(
        "bodies",
        (
            (ledger.Ledger.begin, "parent is not None and record.digests_shared > most", "False"),
            (manifest.Index.calls, "if not 0 <= row.digests_shared <=", "if False and not 0 <="),
        ),
    ),
    "size-of-bodies": Mutant(
        "128 MiB of zeros, compressed",
        (
            (
                coding.Inflation.feed,
                "while start < len(data) and size <= most:",
                "while start < len(data):",
            ),
            (coding.Inflation.feed, ", most - size + 1)", ")"),
        ),
    ),
    "type-of-meta": Mutant("bodies", ((log._owned_finish, "not isinstance(decode_content(meta), dict)", "False"),)),
    "what-a-manifest-says": Mutant(
        "manifests", ((manifest.decode_manifest, "return index if _is_sound(index) else None", "return index"),)
    ),
    "records-of-notes": Mutant(
        "small-files", ((notes.Notes.read, "(msgspec.DecodeError, RecursionError)", "OSError"),)
    ),
    "extensions-of-contents": Mutant("contents", ((content._extension, "(ValueError, TypeError)", "OSError"),)),
    "ids-of-rollouts": Mutant("urls", ((ids.check_rollout_id, " and _ID.fullmatch(value)", ""),)),
    "line-ends": Mutant("events", ((events.EventSplitter.feed_raw, 'len(text) - text.endswith(b"\\r")', "len(text)"),)),
    "odd-events": Mutant(
        "streams", ((joiner.StreamJoiner.feed_event, "except Exception as error:", "except OSError as error:"),)
    ),
    "length-of-answers": Mutant(
        "requests", ((whole.WholeAnswer.body, "length=len(shown) if changed else None", "length=None"),)
    ),
    "body-of-no-encoding": Mutant(
        "requests", ((client._inflated, "except ValueError as error:", "except OSError as error:"),)
    ),
    "end-of-answers": Mutant("engine", ((proxied.ProxiedApp._pass_on, "if answer.started:", "if False:"),)),
    "depth-of-configurations": Mutant("configs", ((_EXTENT, "if self.depth > _DEEPEST + 1:", "if False:"),)),
    "holes-in-files": Mutant(
        "files of a terabyte that hold nothing",
        ((buffers.size_to_read, "if size < _LARGE or 4 * 512 * there.st_blocks >= size:", "if True:"),),
    ),
    "missing-segments": Mutant(
        "a name that leaves out a billion segments",
        ((log.LogReader._is_next, "min(number, expected + _NAMED_MISSING)", "number"),),
    ),
    "nesting-of-records": Mutant(
        "msgpack that nests 100,000 deep",
        ((log.LogReader._apply, "except RecursionError:", "except OSError:"),),
    ),
    "nesting-of-extensions": Mutant(
        "extensions in extensions, 2,000 deep",
        ((content.decode_content, "except RecursionError:", "except OSError:"),),
    ),
    "nesting-of-json": Mutant(
        "JSON that nests 100,000 deep",
        ((events.decode_json, "except RecursionError as error:", "except OSError as error:"),),
    ),
    "size-of-answers": Mutant(
        "128 MiB of zeros, compressed",
        ((coding.Coding.decode, "self._left += _RATIO * len(data)", "self._left = 1 << 40"),),
    ),
    "number-of-members": Mutant(
        "100,000 gzip members that are empty",
        ((coding.Inflation._begin, "if self._members > _MOST_MEMBERS:", "if False:"),),
    ),
    "size-of-heads": Mutant(
        "floods of headers, chunks and interim answers",
        (
            (
                connection.Connection.__init__,
                "max_incomplete_event_size=_LARGEST_HEAD",
                "max_incomplete_event_size=1 << 30",
            ),
        ),
    ),
}
