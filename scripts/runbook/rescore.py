"""Log-probs computed once more with transformers, in float32 and by teacher forcing: one forward pass a sequence.

Where a grammar forced an answer, vLLM's log-probs are those of the ids that the grammar allows: it masks the logits
before it takes them, in every `--logprobs-mode`. Then the same is done here, with the grammar that the server says it
uses (`sampling_params.structured_outputs` of its render routes).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokcap.arrays import FloatArray, IdArray

__all__ = ("TOLERANCE", "Sequence", "Teacher")

TOLERANCE = 1e-3
"""Natural log; float32 on both sides."""


class Teacher:
    """The model and its tokenizer."""

    def __init__(self, model: Path) -> None:
        self.torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._grammars: Any = importlib.import_module("xgrammar")
        self.torch.set_num_threads(1)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(str(model), dtype=self.torch.float32).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
        self._size = self._model.config.vocab_size
        facts = self._grammars.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._size)
        self._compiler = self._grammars.GrammarCompiler(facts, max_threads=1)

    def text(self, ids: IdArray) -> str:
        """What a client sees of ids."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def sequence(self, ids: IdArray) -> Sequence:
        """One forward pass."""
        with self.torch.no_grad():
            given = self.torch.from_numpy(ids.astype(np.int64))
            return Sequence(self, ids, self._model(given[None, :-1]).logits[0])

    def allowed(self, grammar: Mapping[str, Any], ids: IdArray) -> Any:
        """int32 [N, words]: which ids the grammar allows at each of these positions; None if it refuses one of them."""
        if grammar.get("structural_tag"):
            compiled = self._compiler.compile_structural_tag(grammar["structural_tag"])
        else:
            compiled = self._compiler.compile_json_schema(json.dumps(grammar["json"]), any_whitespace=True)
        matcher = self._grammars.GrammarMatcher(compiled)
        mask = self._grammars.allocate_token_bitmask(len(ids), self._size)
        mask.fill_(-1)
        for position, token in enumerate(ids.tolist()):
            if matcher.is_terminated():  # from here on vLLM allows everything
                break
            matcher.fill_next_token_bitmask(mask, position)
            if not matcher.accept_token(token):
                return None
        return mask

    def mask(self, logits: Any, allowed: Any) -> Any:
        """Logits, with those of the other ids at minus infinity."""
        masked = logits.clone()
        self._grammars.apply_token_bitmask_inplace(masked, allowed)
        return masked


class Sequence:
    """The logits of one sequence."""

    def __init__(self, teacher: Teacher, ids: IdArray, logits: Any) -> None:
        self._teacher, self._ids, self._logits = teacher, ids, logits

    def differences(
        self, start: int, told: FloatArray, grammar: Mapping[str, Any] | None = None, late: bool = False
    ) -> FloatArray:
        """float64 [N]: how far the log-probs that were captured of the ids from `start` on are from the model's.

        grammar: what forced them. late: whether it did not hold before the end of some reasoning; where that is, the
        log-probs themselves have to show.
        """
        ids = self._ids[start : start + len(told)]
        logits = self._logits[start - 1 : start - 1 + len(told)]
        free = np.abs(self._taken(logits, ids) - told)
        if not grammar:
            return free
        found = free
        for first in range(len(ids) + 1 if late else 1):
            allowed = self._teacher.allowed(grammar, ids[first:])
            if allowed is None:
                continue
            forced = self._taken(self._teacher.mask(logits[first:], allowed), ids[first:])
            found = np.concatenate([free[:first], np.abs(forced - told[first:])])
            if found.max(initial=0) <= TOLERANCE:
                break
        return found

    def _taken(self, logits: Any, ids: IdArray) -> FloatArray:
        torch = self._teacher.torch
        chosen = torch.from_numpy(ids.astype(np.int64))[:, None]
        found: FloatArray = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy().astype(np.float64)
        return found
