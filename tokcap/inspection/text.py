"""The bytes of token ids, and what they look like.

Engines tell the bytes of what they sampled (`TokenEntry.pieces`), never those of a prompt. What one call sampled stands
in the prompts of others, so a map of all pieces of a store tells most of a prompt; a tokenizer tells all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..arrays import IdArray
from ..errors import InvalidOptionError, TokcapError
from ..store import FileStore, Snapshot
from ..store.records import decode_contents, decode_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = (
    "KnownPieces",
    "Texts",
    "TokenizerBytes",
    "joined",
    "models_of",
    "piece_texts",
    "pieces_of_store",
    "told_bytes",
)

_MOST_ROLLOUTS = 256
_NOTHING_NEW = 64
"""Rollouts in a row without a new id, after which a map is taken to be as good as it gets."""
_MOST_MODELS = 16
_REPLACED = "\N{REPLACEMENT CHARACTER}".encode()
"""What engines say where they can't say the bytes."""


class KnownPieces:
    """Bytes by model and id, from recorded pieces. An id of which two different bytes are recorded is not known."""

    def __init__(self) -> None:
        self._of_model: dict[str, dict[int, bytes | None]] = {}

    def add(self, model: str, ids: Sequence[int] | IdArray, pieces: Sequence[bytes] | None) -> int:
        """Take in the pieces of one answer; how many ids were new."""
        if pieces is None or len(pieces) != len(ids):
            return 0
        if model not in self._of_model and len(self._of_model) >= _MOST_MODELS:
            return 0
        known = self._of_model.setdefault(model, {})
        before = len(known)
        for token, piece in told_bytes(ids, pieces):
            if known.setdefault(token, piece) != piece:
                known[token] = None
        return len(known) - before

    def add_snapshot(self, snapshot: Snapshot) -> int:
        """Take in what one rollout recorded; how many ids were new. No prompt is read."""
        entries, new = snapshot.entries, 0
        for index in entries.chosen:
            stored = entries.load(entries.nodes[index])
            pieces = decode_pieces(bytes(stored.head.pieces))
            if pieces is not None:
                new += self.add(decode_contents(bytes(stored.head.contents)).model, stored.generated, pieces)
        return new

    def get(self, token: int, models: Collection[str] | None = None) -> bytes | None:
        """The bytes of an id; None if they are not known, or if `models` (None: all) disagree on them."""
        found = {
            known[token]
            for model, known in self._of_model.items()
            if (models is None or model in models) and token in known
        }
        return found.pop() if len(found) == 1 else None

    def __len__(self) -> int:
        return sum(piece is not None for known in self._of_model.values() for piece in known.values())


def told_bytes(ids: Sequence[int] | IdArray, pieces: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """The ids of an answer whose pieces are their own bytes, each with them."""
    late = False
    for token, piece in zip(map(int, ids), pieces, strict=True):
        # An engine that puts a character together late says b"" for its first ids and all its bytes at the last.
        if piece and not late and _REPLACED not in piece:
            yield token, piece
        late = not piece


def pieces_of_store(store: FileStore, first: Iterable[str] = (), *, most: int = _MOST_ROLLOUTS) -> KnownPieces:
    """The pieces of `first`, and of other rollouts drawn evenly from the whole store, `most` of them.

    It stops where more rollouts tell nothing new. What can't be read or listed is left out.
    """
    from .scan import wanted_ids

    known = KnownPieces()
    chosen = list(dict.fromkeys(first))
    for rollout_id in chosen:
        _add(known, store, rollout_id)
    others = wanted_ids(store, unlisted={})
    step = max(len(others) // max(most, 1), 1)
    nothing_new = 0
    there = set(chosen)
    for rollout_id in others[::step][:most]:
        if rollout_id in there:
            continue
        nothing_new = 0 if _add(known, store, rollout_id) else nothing_new + 1
        if nothing_new >= _NOTHING_NEW:
            break
    return known


def _add(known: KnownPieces, store: FileStore, rollout_id: str) -> int:
    try:
        with store.read_now(rollout_id) as snapshot:
            return known.add_snapshot(snapshot)
    except TokcapError:
        return 0


def models_of(snapshot: Snapshot) -> frozenset[str]:
    """The models that answered in a rollout."""
    entries = snapshot.entries
    heads = (entries.load(entries.nodes[index]).head for index in entries.chosen)
    return frozenset(decode_contents(bytes(head.contents)).model for head in heads)


class TokenizerBytes:
    """The bytes of ids from a `tokenizer.json` (or a directory with one), by the library `tokenizers`.

    approximate: the tokenizer is of a kind that writes bytes in no way that is known here (neither byte-level nor
    SentencePiece), so a text is what it decodes single ids to.

    Raises `InvalidOptionError` if there is no such file, it is none, or the library isn't installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise InvalidOptionError(
                'the text of ids needs the library tokenizers: pip install "tokcap[tokenizer]"'
            ) from error
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else os.fspath(path)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(file)
        except Exception as error:  # the library raises plain Exceptions
            raise InvalidOptionError(f"{file} is no tokenizer.json that tokenizers can read: {error}") from error
        told = json.loads(self._tokenizer.to_str())
        kinds = set(_kinds(told.get("decoder"))) | set(_kinds(told.get("pre_tokenizer")))
        self._added = {int(token["id"]): str(token["content"]).encode() for token in told.get("added_tokens") or ()}
        self._spell: Callable[[str], bytes] | None = None
        if "ByteLevel" in kinds:
            self._spell = _byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._spell = _sentence_piece
        self.approximate = self._spell is None

    def __call__(self, token: int) -> bytes | None:
        """The bytes of an id; None if the tokenizer has no such id."""
        if token in self._added:
            return self._added[token]
        written = self._tokenizer.id_to_token(token) if 0 <= token < 2**31 else None
        if written is None:
            return None
        if self._spell is not None:
            return self._spell(written)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


def _kinds(step: Any) -> Iterator[str]:
    """The types of the steps of a decoder or pre-tokenizer."""
    if isinstance(step, Mapping):
        yield str(step.get("type", ""))
        for inner in (*step.get("decoders", ()), *step.get("pretokenizers", ())):
            yield from _kinds(inner)


def _alphabet() -> dict[str, int]:
    """The characters in which byte-level tokenizers write bytes: printable Latin-1 as it is, the rest from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level(written: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in written)
    except KeyError:
        return written.encode()


def _sentence_piece(written: str) -> bytes:
    if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
        try:
            return bytes.fromhex(written[3:5])
        except ValueError:
            pass
    return written.replace("\u2581", " ").encode()


class Texts:
    """The bytes of ids from the best source that there is: an exact tokenizer, recorded pieces, any tokenizer."""

    def __init__(self, known: KnownPieces | None = None, tokenizer: TokenizerBytes | None = None) -> None:
        self.known = KnownPieces() if known is None else known
        self.tokenizer = tokenizer

    @property
    def approximate(self) -> bool:
        """Whether some texts may be only what a tokenizer decodes single ids to."""
        return self.tokenizer is not None and self.tokenizer.approximate

    def get(self, token: int, models: Collection[str] | None = None) -> bytes | None:
        """The bytes of an id, for an answer of one of `models`; None if nothing tells."""
        exact = self.tokenizer is not None and not self.tokenizer.approximate
        if self.tokenizer is not None and exact and (found := self.tokenizer(token)) is not None:
            return found
        found = self.known.get(token, models)
        return found if found is not None or self.tokenizer is None or exact else self.tokenizer(token)

    def of(self, models: Collection[str]) -> Callable[[int], bytes | None]:
        """A function for `build(token_bytes=...)`: bytes that are exact, of the ids of these models."""
        known: dict[int, bytes | None] = {}

        def bytes_of(token: int) -> bytes | None:
            if token not in known:
                if self.tokenizer is not None and not self.tokenizer.approximate:
                    known[token] = self.tokenizer(token)
                else:
                    known[token] = self.known.get(token, models)
            return known[token]

        return bytes_of

    def pieces(
        self, ids: Sequence[int] | IdArray, models: Collection[str] | None = None, told: Sequence[bytes] | None = None
    ) -> list[bytes | None]:
        """The bytes of each id. told: those that were recorded with this very answer, which outrank all."""
        if told is not None and len(told) == len(ids):
            return list(told)
        return [self.get(int(token), models) for token in ids]


def joined(ids: Sequence[int] | IdArray, pieces: Sequence[bytes | None]) -> str:
    """The text of a run of ids. Bytes are joined before they are decoded; `⟨7⟩` stands for an id without bytes, and
    bytes that are no UTF-8 are escaped."""
    parts: list[str] = []
    run: list[bytes] = []
    for token, piece in zip(ids, pieces, strict=True):
        if piece is None:
            parts += (_decoded(b"".join(run)), f"⟨{int(token)}⟩")
            run = []
        else:
            run.append(piece)
    parts.append(_decoded(b"".join(run)))
    return "".join(parts)


def piece_texts(pieces: Iterable[bytes | None]) -> list[str]:
    """Each piece by itself, part of a character as escapes; empty where the bytes are not known."""
    return ["" if piece is None else _decoded(piece) for piece in pieces]


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")
