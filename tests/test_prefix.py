"""Suffix coding: whatever prompts share, they come back exactly, and only what is new is written."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.state_model import Operation, Seen, exactly_equal
from tests.store_worker import RemoteObject, UnsyncedFiles
from tokcap import FileStore, TokenEntry
from tokcap.store import Snapshot, sequences
from tokcap.store.frame import content_end
from tokcap.store.prefix import NO_PARENT, common_prefix, fill_sequence
from tokcap.store.records import ID_DTYPES, LOG_PROB_DTYPES
from tokcap.store.snapshot import Entries

ROLLOUT = "r-1"
Ids = npt.NDArray[np.integer[Any]]


def numbers(chance: random.Random, count: int, largest: int = 150_000) -> Ids:
    return np.random.default_rng(chance.getrandbits(32)).integers(0, largest, count)


def entry(call: int | str, prompt: Sequence[int] | Ids, generated: Sequence[int] | Ids, **fields: Any) -> TokenEntry:
    log_probs = np.linspace(-3, -0.01, len(generated))
    name = call if isinstance(call, str) else f"c-{call}"
    return TokenEntry(ROLLOUT, name, prompt, generated, log_probs, **fields)


def sequence(one: TokenEntry) -> Ids:
    return np.concatenate([one.prompt_token_ids, one.generation_token_ids]).astype(np.int64)


def chain(turns: int, *, prompt: int = 30, generated: int = 20, seed: int = 0) -> list[TokenEntry]:
    """A conversation: every prompt extends the one before it and what was sampled."""
    chance = random.Random(seed)
    made: list[TokenEntry] = []
    context = numbers(chance, 200)
    for turn in range(turns):
        made.append(entry(turn, context, numbers(chance, generated)))
        context = np.concatenate([sequence(made[-1]), numbers(chance, prompt)])
    return made


class Forest:
    """Prompts as agents make them: up to 20 at once, with shared system prompts, drift, retries and summaries."""

    def __init__(self, seed: int, agents: int) -> None:
        self.chance = random.Random(seed)
        systems = [numbers(self.chance, self.chance.choice((0, 15, 16, 17, 100))) for _ in range(2)]
        self.contexts: list[Ids] = [self.chance.choice(systems) for _ in range(agents)]
        self.entries: list[TokenEntry] = []

    def grow(self, calls: int) -> list[TokenEntry]:
        for _ in range(calls):
            self._call()
        return self.entries

    def _call(self) -> None:
        chance, agent = self.chance, self.chance.randrange(len(self.contexts))
        prompt = np.concatenate([self.contexts[agent], numbers(chance, chance.choice((0, 1, 5, 40)))])
        match chance.choice(("extend",) * 6 + ("drift", "drift", "retry", "equal", "summary", "empty", "cut")):
            case "drift" if len(prompt):
                # Anywhere: in the system prompt, in an earlier prompt, in something that was sampled.
                prompt[chance.randrange(len(prompt))] ^= 1
            case "cut":
                prompt = prompt[: chance.randint(0, len(prompt))]
            case "retry" | "equal" if self.entries:
                prompt = chance.choice(self.entries).prompt_token_ids.astype(np.int64)
            case "summary":
                prompt = np.concatenate([prompt[:16], numbers(chance, 30)])
            case "empty":
                prompt = prompt[:0]
        largest = chance.choice((250, 60_000, 2**31))
        made = entry(len(self.entries), prompt, numbers(chance, chance.choice((0, 1, 10, 60)), largest))
        self.entries.append(made)
        if chance.random() < 0.9:
            self.contexts[agent] = sequence(made)


def check(snapshot: Snapshot, put: Sequence[TokenEntry]) -> None:
    with snapshot:
        by_call = {stored.model_call_id: stored for stored in snapshot.entries}
        assert len(by_call) == len(put)
        for one in put:
            assert exactly_equal(by_call[one.model_call_id], one)
        assert not snapshot.incomplete


@pytest.fixture
def store(store_dir: Path) -> Iterator[FileStore]:
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as store:
        yield store


def segment_bytes_on_disk(directory: Path) -> int:
    """Without space that is written ahead."""
    contents = (path.read_bytes() for path in directory.glob("rollouts/*/*/*/*.*"))
    return sum(content_end(data, len(data)) for data in contents)


# ---- everything comes back


FORESTS = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from((1, 1, 2, 5, 20))).map(lambda drawn: Forest(*drawn))


@settings(max_examples=60)
@given(
    forest=FORESTS,
    calls=st.integers(1, 60),
    segment_bytes=st.sampled_from((300, 3000, 64 << 20)),
    cache_bytes=st.sampled_from((1, 24 << 20)),
    objects=st.integers(1, 3),
)
def test_any_forest_of_prompts_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    forest: Forest,
    calls: int,
    segment_bytes: int,
    cache_bytes: int,
    objects: int,
) -> None:
    directory = tmp_path_factory.mktemp("forest") / "store"
    put = forest.grow(calls)
    options: dict[str, Any] = {"segment_bytes": segment_bytes, "cache_bytes": cache_bytes, "sweep_every_s": 0}
    stores = [FileStore(directory, files=UnsyncedFiles(), **options) for _ in range(objects)]
    try:
        for number, one in enumerate(put):
            writer = forest.chance.choice(stores)
            writer.put_now(one)
            if cache_bytes == 1 and number % 4 == 0:
                writer.put_now(TokenEntry("r-other", f"c-{number}", [1], [2], [-1.0]))
            if number == calls // 2:
                check(stores[0].read_now(ROLLOUT), put[: number + 1])
        check(stores[-1].read_now(ROLLOUT), put)
        for one in put:
            stores[0].put_now(one)
        with stores[0].read_now(ROLLOUT) as look:
            assert len(look.entries.nodes) == len(put), "a repetition is stored once"
        check(stores[0].freeze_now(ROLLOUT), put)
        check(stores[-1].freeze_now(ROLLOUT), put)
        stores[0].settle_call_now(ROLLOUT, "c-late", "aborted")
        check(stores[-1].freeze_now(ROLLOUT), put)
    finally:
        for store in stores:
            store.close_now()
    with FileStore(directory, read_only=True) as reader:
        check(reader.read_now(ROLLOUT), put)
    shutil.rmtree(directory)


def test_a_forest_comes_back_in_another_process(store: FileStore, store_dir: Path) -> None:
    put = Forest(7, 20).grow(120)
    worker = RemoteObject("worker")
    try:
        worker.open(str(store_dir))
        for number, one in enumerate(put):
            if number % 3:
                store.put_now(one)
            else:
                assert worker.start(Operation("put", ROLLOUT, entries=(one,))).result(60) is None
        for name in ("read", "freeze"):
            shown = worker.start(Operation(name, ROLLOUT)).result(60)
            assert isinstance(shown, Seen)
            stored = {one.model_call_id: one for one in shown.entries}
            assert all(exactly_equal(stored[one.model_call_id], one) for one in put)
    finally:
        worker.end()
    check(store.freeze_now(ROLLOUT), put)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 29, 30, 31, 49, 50, 51, 79, 80])
def test_drift_at_any_place_is_kept(store: FileStore, position: int) -> None:
    """30 ids of prompt, 20 sampled, 31 more: the place lies in the first, in the second, at their borders, behind."""
    chance = random.Random(position)
    first = entry("c-1", numbers(chance, 30), numbers(chance, 20))
    prompt = np.concatenate([sequence(first), numbers(chance, 31)])
    prompt[position] ^= 1
    second = entry("c-2", prompt, numbers(chance, 5))
    third = entry("c-3", np.concatenate([sequence(second), numbers(chance, 3)]), [1])
    for one in (first, second, third):
        store.put_now(one)
    with store.freeze_now(ROLLOUT) as snapshot:
        nodes = snapshot.entries.nodes
        shared = min(position, 50)
        assert (nodes[1].parent, nodes[1].shared) == ((0, shared) if shared >= 16 else (NO_PARENT, 0))
        assert (nodes[2].parent, nodes[2].shared) == (1, nodes[1].total)
    check(store.freeze_now(ROLLOUT), [first, second, third])


def test_equal_and_empty_prompts_and_generations_come_back(store: FileStore) -> None:
    prompt = list(range(100))
    put = [entry(n, prompt, [n] * (n % 3)) for n in range(20)] + [entry(n, [], [n] * (n % 2)) for n in range(20, 25)]
    for one in put:
        store.put_now(one)
    check(store.read_now(ROLLOUT), put)
    check(store.freeze_now(ROLLOUT), put)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1087, 1088, 1089, 20_000])
def test_common_prefix_finds_the_first_difference(length: int) -> None:
    one = np.arange(length, dtype=np.int32)
    assert common_prefix(one, one.copy()) == length
    assert common_prefix(one, np.append(one, 5).astype(np.int32)) == length
    for position in {0, 1, 62, 63, 64, 65, 1000, 1087, 1088, length - 1} & set(range(length)):
        other = one.copy()
        other[position] = -1
        assert common_prefix(one, other) == common_prefix(other, one) == position


# ---- what is written


def sizes_per_put(store: FileStore, directory: Path, put: Sequence[TokenEntry]) -> list[int]:
    sizes = [0]
    for one in put:
        store.put_now(one)
        sizes.append(segment_bytes_on_disk(directory))
    return [after - before for before, after in itertools.pairwise(sizes)]


def test_bytes_per_put_do_not_grow_with_the_history(store: FileStore, store_dir: Path) -> None:
    put = chain(200)
    written = sizes_per_put(store, store_dir, put)
    # 30 new ids and 20 sampled ones at 4 bytes, 20 log-probs at 8, and what an entry takes without any.
    assert max(written[1:]) <= 50 * 4 + 20 * 8 + 200
    assert max(written[-10:]) <= max(written[1:11]) + 32
    check(store.freeze_now(ROLLOUT), put)


def test_bytes_per_put_do_not_grow_when_two_objects_take_turns_or_the_cache_holds_nothing(
    store: FileStore, store_dir: Path
) -> None:
    put = chain(120)
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles(), cache_bytes=1) as forgetful:
        written = []
        for number, one in enumerate(put):
            before = segment_bytes_on_disk(store_dir)
            (store, forgetful)[number % 2].put_now(one)
            written.append(segment_bytes_on_disk(store_dir) - before)
            forgetful.put_now(TokenEntry("r-0", f"c-{number}", [], [], []))
            shutil.rmtree(next(store_dir.glob("rollouts/*/r-0")))
        assert max(written[1:]) <= 50 * 4 + 20 * 8 + 200
    check(store.freeze_now(ROLLOUT), put)


@pytest.mark.parametrize("agents", [12, 70])
def test_sub_agents_that_take_turns_are_stored_as_suffixes(store: FileStore, store_dir: Path, agents: int) -> None:
    """Also after a restart, which has to find where each of them was."""
    system = numbers(random.Random(0), 3000)
    chance, put, contexts = random.Random(1), list[TokenEntry](), [system] * agents
    for turn in range(840 // agents // 7):
        for agent in range(agents):
            prompt = np.concatenate([contexts[agent], numbers(chance, 20)])
            put.append(entry(f"c-{agent}-{turn}", prompt, numbers(chance, 10)))
            contexts[agent] = sequence(put[-1])
    written = sizes_per_put(store, store_dir, put[:-agents])
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as other:
        written += sizes_per_put(other, store_dir, put[-agents:])[1:]
    assert max(written[1:]) <= 30 * 4 + 10 * 8 + 200
    check(store.freeze_now(ROLLOUT), put)


def test_a_new_segment_begins_with_a_full_prompt_and_goes_on_with_suffixes(store_dir: Path) -> None:
    put = chain(300, prompt=30, generated=20)
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles(), segment_bytes=40_000) as store:
        for one in put:
            store.put_now(one)
        with store.freeze_now(ROLLOUT) as snapshot:
            nodes = snapshot.entries.nodes
            by_segment: dict[int, list[int]] = {}
            for node in nodes:
                by_segment.setdefault(node.segment, []).append(node.parent)
            assert len(by_segment) > 2
            for parents in by_segment.values():
                assert parents[0] == NO_PARENT
                assert NO_PARENT not in parents[1:]
            assert all(n.parent == NO_PARENT or nodes[n.parent].segment == n.segment for n in nodes)
        check(store.freeze_now(ROLLOUT), put)


@pytest.mark.parametrize("when", ["with a retry", "with a drift"])
def test_what_comes_back_to_an_early_prompt_refers_to_no_later_frame(
    store: FileStore, store_dir: Path, tmp_path: Path, when: str
) -> None:
    put = chain(10)
    for one in put:
        store.put_now(one)
    prompt = put[3].prompt_token_ids.astype(np.int64)
    if when == "with a drift":
        prompt = np.append(prompt, 5)
    retry = entry("c-retry", prompt, [1, 2, 3])
    store.put_now(retry)
    with store.freeze_now(ROLLOUT) as snapshot:
        nodes = snapshot.entries.nodes
        ancestor, used = len(nodes) - 1, []
        while ancestor != NO_PARENT:
            used.append(ancestor)
            ancestor = nodes[ancestor].parent
        assert used[0] == 10
        assert max(used[1:]) <= 3
        path = snapshot.entries._paths[nodes[4].segment]
    # The frame of the fifth call is damaged: it costs the calls whose prompt runs through it, and no other.
    copy = tmp_path / "copy"
    shutil.copytree(store_dir, copy)
    damaged = copy / Path(path).relative_to(store_dir)
    content = bytearray(damaged.read_bytes())
    content[nodes[4].body_start + nodes[4].body_length // 2] ^= 0xFF
    damaged.unlink()
    damaged.write_bytes(content)
    with FileStore(copy, read_only=True) as reader, reader.freeze_now(ROLLOUT) as snapshot:
        stored = {one.model_call_id: one for one in snapshot.entries}
        assert sorted(stored) == sorted([*(f"c-{n}" for n in range(4)), "c-retry"])
        assert all(exactly_equal(stored[one.model_call_id], one) for one in (*put[:4], retry))
        assert snapshot.incomplete


def test_request_digests_of_sub_agents_that_take_turns_are_stored_as_suffixes(
    store: FileStore, store_dir: Path
) -> None:
    agents, chance = 40, random.Random(0)
    histories = [[chance.randbytes(16) for _ in range(50)] for _ in range(agents)]
    begun: dict[str, tuple[bytes, ...]] = {}
    written = []
    for turn in range(4):
        for agent, history in enumerate(histories):
            history += [chance.randbytes(16), chance.randbytes(16)]
            begun[f"c-{agent}-{turn}"] = tuple(history)
            before = segment_bytes_on_disk(store_dir)
            store.begin_call_now(ROLLOUT, f"c-{agent}-{turn}", request_digests=history)
            written.append(segment_bytes_on_disk(store_dir) - before)
    assert max(written[agents:]) <= 2 * 16 + 200
    with store.freeze_now(ROLLOUT) as snapshot:
        assert {call.model_call_id: tuple(call.request_digests) for call in snapshot.calls} == begun


def test_request_digests_of_a_repeated_history_are_stored_as_a_suffix(store: FileStore, store_dir: Path) -> None:
    chance = random.Random(0)
    history = [chance.randbytes(16) for _ in range(4)]
    requests, written = [], []
    for number in range(150):
        history = [*history, chance.randbytes(16), chance.randbytes(16)]
        requests.append(history)
        before = segment_bytes_on_disk(store_dir)
        store.begin_call_now(ROLLOUT, f"c-{number}", request_digests=history)
        written.append(segment_bytes_on_disk(store_dir) - before)
    assert max(written[1:]) <= 2 * 16 + 120
    with FileStore(store_dir, sweep_every_s=0) as second:
        again = [*history[:100], chance.randbytes(16)]
        requests.append(again)
        before = segment_bytes_on_disk(store_dir)
        second.begin_call_now(ROLLOUT, "c-150", request_digests=again)
        assert segment_bytes_on_disk(store_dir) - before <= 16 + 120
        for look in (store.read_now(ROLLOUT), second.freeze_now(ROLLOUT)):
            with look as snapshot:
                assert [tuple(call.request_digests) for call in snapshot.calls] == [tuple(made) for made in requests]
        store.settle_call_now(ROLLOUT, "c-150", "aborted")
        with second.freeze_now(ROLLOUT) as snapshot:
            assert [tuple(call.request_digests) for call in snapshot.calls] == [tuple(made) for made in requests]


def test_request_digests_survive_small_segments_and_drift(store_dir: Path) -> None:
    chance = random.Random(0)
    requests: list[list[bytes]] = []
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles(), segment_bytes=600) as store:
        for number in range(80):
            base = chance.choice(requests[-12:]) if requests else []
            cut = base[: chance.randint(0, len(base))]
            requests.append([*cut, *(chance.randbytes(16) for _ in range(chance.choice((0, 1, 3))))])
            store.begin_call_now(ROLLOUT, f"c-{number}", request_digests=requests[-1])
        for look in (store.read_now(ROLLOUT), store.freeze_now(ROLLOUT)):
            with look as snapshot:
                assert [tuple(call.request_digests) for call in snapshot.calls] == [tuple(made) for made in requests]


IDS = [([0, 255], "<u1"), ([256], "<u2"), ([65_535, 0], "<u2"), ([65_536], "<i4"), ([2**31 - 1], "<i4"), ([], "<u1")]
LOG_PROBS = [
    ([-0.5, -2.0, 0.0, -0.0], "<f2"),
    ([float("-inf"), float("nan"), float("inf")], "<f2"),
    ([float(np.float32(-0.1)), float("nan")], "<f4"),
    ([-0.1], "<f8"),
    ([-1e-300], "<f8"),
    ([float(np.float32(-3e38))], "<f4"),
    ([-4e38], "<f8"),
    ([-65504.0], "<f2"),
    ([-65520.0], "<f4"),
    ([], "<f2"),
]


@pytest.mark.parametrize(("ids", "dtype"), IDS, ids=repr)
def test_ids_are_stored_in_the_smallest_dtype_that_holds_them(store: FileStore, ids: list[int], dtype: str) -> None:
    put = [entry("c-1", ids, [7]), entry("c-2", [1], ids)]
    for one in put:
        store.put_now(one)
    with store.freeze_now(ROLLOUT) as snapshot:
        heads = [snapshot.entries.load(node).head for node in snapshot.entries.nodes]
        assert ID_DTYPES[heads[0].suffix_dtype].str == np.dtype(dtype).str
        assert ID_DTYPES[heads[1].generated_dtype].str == np.dtype(dtype).str
    check(store.freeze_now(ROLLOUT), put)


@pytest.mark.parametrize(("log_probs", "dtype"), LOG_PROBS, ids=repr)
def test_log_probs_are_stored_in_the_smallest_dtype_that_gives_every_bit_back(
    store: FileStore, log_probs: list[float], dtype: str
) -> None:
    put = TokenEntry(ROLLOUT, "c-1", [1], list(range(len(log_probs))), log_probs)
    store.put_now(put)
    with store.freeze_now(ROLLOUT) as snapshot:
        (node,) = snapshot.entries.nodes
        stored = snapshot.entries.load(node)
        assert LOG_PROB_DTYPES[stored.head.log_prob_dtype].str == np.dtype(dtype).str
        assert stored.log_probs.nbytes == len(log_probs) * np.dtype(dtype).itemsize
    check(store.freeze_now(ROLLOUT), [put])


# ---- what is read


def test_the_prompts_of_a_linear_chain_are_views_of_one_buffer_made_when_asked(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []

    def counting(nodes: Any, index: int, out: Any, load: Any) -> None:
        filled.append(index)
        fill_sequence(nodes, index, out, load)

    monkeypatch.setattr(sequences, "fill_sequence", counting)
    put = chain(100)
    for one in put:
        store.put_now(one)
    with store.freeze_now(ROLLOUT) as snapshot:
        assert len(snapshot.entries) == 100
        assert len(snapshot.calls) == 100
        assert filled == []
        prompts = [stored.prompt_token_ids for stored in snapshot.entries]
        again = snapshot.entries[50].prompt_token_ids
        assert filled == [99]
    assert all(not prompt.flags.writeable and not prompt.flags.owndata for prompt in prompts)
    assert all(np.shares_memory(prompts[-1], prompt) for prompt in [*prompts[:-1], again])
    assert all(np.array_equal(prompt, one.prompt_token_ids) for prompt, one in zip(prompts, put, strict=True))


def test_a_drifted_branch_has_a_buffer_of_its_own(store: FileStore) -> None:
    put = chain(10)
    drifted = put[5].prompt_token_ids.astype(np.int64)
    drifted[-1] ^= 1
    put += [entry("c-drift", drifted, [1]), entry("c-drift-2", [*drifted, 1, 2], [3])]
    for one in put:
        store.put_now(one)
    with store.freeze_now(ROLLOUT) as snapshot:
        prompts = {stored.model_call_id: stored.prompt_token_ids for stored in snapshot.entries}
    assert np.shares_memory(prompts["c-drift"], prompts["c-drift-2"])
    assert not np.shares_memory(prompts["c-drift"], prompts["c-9"])


def test_a_chain_of_five_thousand_calls_takes_linear_work_and_no_recursion(
    store: FileStore, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 5000
    chance = random.Random(0)
    context = numbers(chance, calls * 8).astype(np.int32)
    put = [entry(n, context[: 8 * n + 4], context[8 * n + 4 : 8 * n + 8]) for n in range(calls)]
    for one in put:
        store.put_now(one)
    assert segment_bytes_on_disk(store_dir) < calls * 250
    loads = 0
    load = Entries.load

    def counting(entries: Entries, node: Any) -> Any:
        nonlocal loads
        loads += 1
        return load(entries, node)

    monkeypatch.setattr(Entries, "load", counting)
    limit = sys.getrecursionlimit()
    depth = 0
    frame: Any = sys._getframe()
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    try:
        sys.setrecursionlimit(depth + 60)
        with store.freeze_now(ROLLOUT) as snapshot:
            stored = list(snapshot.entries)
        with FileStore(store_dir, sweep_every_s=0) as second:
            check(second.read_now(ROLLOUT), put)
            second.put_now(put[-1])
    finally:
        sys.setrecursionlimit(limit)
    assert len(stored) == calls
    assert loads <= 5 * calls
    assert all(exactly_equal(one, other) for one, other in zip(stored, put, strict=True))
    assert np.shares_memory(stored[100].prompt_token_ids, stored[-1].prompt_token_ids)
