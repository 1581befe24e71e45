"""What agents do: conversations, retries, sub-agents, clients that go away, requests that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from .wire import MODEL, Clients

__all__ = ("Drive", "Expected", "agents", "at", "edges", "other_dialects")

SYSTEM = "You are a helpful assistant. Answer briefly."
QUESTIONS = ("Name a bird.", "What does it eat? 🐟 or naïve guesses welcome.", "Where does it live?")

CITIES = (
    "Paris Madrid Lisbon Berlin Vienna Prague Warsaw Budapest Athens Sofia Bucharest Helsinki Stockholm Copenhagen "
    "Dublin London Brussels Amsterdam Bern Belgrade Zagreb Ljubljana Bratislava Vilnius Riga Tallinn Kraków Łódź Köln "
    "München Zürich Genève Reykjavík Tórshavn Málaga Córdoba Besançon Nîmes Århus Malmö Tromsø Bodø 東京 北京 서울 🏙️"
)


class Expected(msgspec.Struct):
    """What has to be found of a rollout."""

    outcomes: dict[str, int]
    """Calls by outcome; no outcomes: no trace of the rollout."""
    metrics: dict[str, int] = {}
    """Metrics of the build, exactly."""


class Drive:
    """The clients of one phase, and what their calls have to leave behind."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.expected: dict[str, Expected] = {}
        self.problems: list[str] = []
        self._seeds = itertools.count(1)
        self._cities = itertools.cycle(CITIES.split())

    def sampling(self, temperature: float = 1.0) -> dict[str, Any]:
        """Sampling members of a request; each time another seed."""
        return {"model": MODEL, "temperature": temperature, "seed": next(self._seeds)}

    def weather(self) -> dict[str, Any]:
        """A question that was not asked before: calls with the same prompt would count as retries of each other."""
        return user(f"Weather in {next(self._cities)}?")

    def expect(self, rollout: str, metrics: dict[str, int] | None = None, **outcomes: int) -> None:
        """Say what has to be found of a rollout."""
        self.expected[rollout] = Expected(outcomes, metrics or {})

    def check(self, fact: object, what: str) -> None:
        """Note a problem unless `fact` holds."""
        if not fact:
            self.problems.append(what)

    @contextmanager
    def refused(self, kind: str, what: str) -> Iterator[None]:
        """What a client does in the block has to raise an error of this class."""
        try:
            yield
        except Exception as error:
            self.check(type(error).__name__ == kind, f"{what}: {type(error).__name__} instead of {kind}: {error}")
        else:
            self.problems.append(f"{what}: no error")

    def chat(self, client: Any, messages: list[dict[str, Any]], *, stream: bool = False, **asked: Any) -> str:
        """One chat completion; its text is appended to the conversation."""
        asked = {"max_tokens": 24, **self.sampling(), **asked}
        if stream:
            chunks = client.chat.completions.create(messages=messages, stream=True, **asked)
            deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
            text = "".join(filter(None, deltas))
        else:
            text = client.chat.completions.create(messages=messages, **asked).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        return text


def begun(system: str = SYSTEM) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}]


def at(temperature: float) -> dict[str, Any]:
    """For the client of Anthropic, whose versions don't all know it by name."""
    return {"extra_body": {"temperature": temperature}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ---- agents


def agents(drive: Drive) -> None:
    """Whole rollouts as agents run them."""
    for stream in (False, True):
        _loop(drive, f"loop-{'streamed' if stream else 'whole'}", stream)
    _two_agents(drive, "agents-1")
    _token_in(drive, "token-in-1")
    _retry_in_ids(drive, "retry-1")
    _retry_of_chat(drive, "retry-chat-1")


def _loop(drive: Drive, rollout: str, stream: bool) -> None:
    """One agent that sends its history back as text."""
    client, messages = drive.clients.openai(rollout), begun()
    for question in QUESTIONS:
        messages.append(user(question))
        drive.chat(client, messages, stream=stream)
    drive.expect(rollout, recorded=len(QUESTIONS))


def _two_agents(drive: Drive, rollout: str) -> None:
    """A main agent that leaves a part of its task to another one, in the same rollout."""
    client, main, other = drive.clients.openai(rollout), begun(), begun("You look things up. Give one fact.")
    main.append(user("Plan a trip to Rome."))
    plan = drive.chat(client, main)
    for text in (f"Find something for: {plan}", "Another one."):
        other.append(user(text))
        fact = drive.chat(client, other, stream=True)
    main.append(user(f"It is known that {fact}. Go on."))
    drive.chat(client, main)
    drive.expect(rollout, recorded=4)


def _token_in(drive: Drive, rollout: str) -> None:
    """An agent that keeps ids: the next prompt is the last one, what was sampled, and the ids of what is new."""
    client, prompt = drive.clients.openai(rollout), drive.clients.tokens("Once upon a time")
    for turn in range(4):
        prompt = _turn(drive, client, prompt, f" Turn {turn}:")
    drive.expect(rollout, {"trajectories": 1, "drifted_calls": 0, "restarted_calls": 0}, recorded=4)


def _turn(drive: Drive, client: Any, prompt: list[int], new: str, **asked: Any) -> list[int]:
    asked = {**drive.sampling(), **asked}
    ids = {"extra_body": {"return_token_ids": True}}
    choice = client.completions.create(prompt=prompt, max_tokens=16, **asked, **ids).choices[0]
    return [*prompt, *choice.token_ids, *drive.clients.tokens(new)]


def _retry_in_ids(drive: Drive, rollout: str) -> None:
    """An answer is lost on its way; the client asks again, and goes on with the second one."""
    client = drive.clients.openai(rollout).with_options(max_retries=2)
    prompt = _turn(drive, client, drive.clients.tokens("The quick brown"), " and then")
    drive.clients.drops = 1
    unseeded = {"seed": None}
    prompt = _turn(drive, client, prompt, " so", **unseeded)
    _turn(drive, client, prompt, ".")
    lost = [each for each in drive.clients.exchanges if each.rollout == rollout and each.dropped]
    retries = [each.retry for each in drive.clients.exchanges if each.rollout == rollout]
    drive.check(len(lost) == 1 and retries == [0, 0, 1, 0], f"{rollout}: retry counts are {retries}")
    # 16 ids were asked for, and no text of this model ends so early by itself.
    drive.expect(rollout, {"abandoned": 16, "trajectories": 2}, recorded=4)


def _retry_of_chat(drive: Drive, rollout: str) -> None:
    """The same, with a history of text, and several answers lost."""
    client, messages = drive.clients.openai(rollout).with_options(max_retries=3), begun()
    messages.append(user(QUESTIONS[0]))
    drive.clients.drops = 2
    drive.chat(client, messages, seed=None)
    messages.append(user(QUESTIONS[1]))
    drive.chat(client, messages)
    drive.expect(rollout, recorded=4)


# ---- what goes another way


def edges(drive: Drive) -> None:
    """Completions in all forms, clients that go away, refused requests, and what is no model call."""
    _completions(drive, "completions-1")
    _native(drive, "native-1")
    _gone(drive, "gone-1")
    _refused(drive, "refused-1")
    _controls(drive, "controls-1")
    _wishes(drive, "wishes-1")


def _completions(drive: Drive, rollout: str) -> None:
    client = drive.clients.openai(rollout)
    create: Callable[..., Any] = client.completions.create
    create(prompt="Rome is", max_tokens=12, **drive.sampling())
    list(create(prompt="Paris is", max_tokens=12, stream=True, **drive.sampling()))
    create(prompt=drive.clients.tokens("Oslo is"), max_tokens=12, **drive.sampling())
    create(prompt=["Rome was", "Oslo was"], max_tokens=8, **drive.sampling())
    create(prompt="One two three", max_tokens=12, n=2, **drive.sampling())
    list(create(prompt="Two three four", max_tokens=12, n=2, stream=True, **drive.sampling()))
    create(prompt="One, two, three, four,", max_tokens=30, stop=[" ten", " nine"], **drive.sampling(0.0))
    chat: Callable[..., Any] = client.chat.completions.create
    chat(messages=[user("Name a colour.")], max_tokens=12, n=2, **drive.sampling())
    list(chat(messages=[user("Name a number.")], max_tokens=12, n=2, stream=True, **drive.sampling()))
    counting = [[user(f"Count from one to {end}, in words.")] for end in ("ten", "twelve")]
    chat(messages=counting[0], max_tokens=30, stop=["e, ", "3"], **drive.sampling(0.0))
    list(chat(messages=counting[1], max_tokens=30, stop=["e, ", "3"], stream=True, **drive.sampling(0.0)))
    drive.expect(rollout, recorded=11)


def _native(drive: Drive, rollout: str) -> None:
    client = drive.clients.openai(rollout, root=True)
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    body = {"model": MODEL, "token_ids": drive.clients.tokens("Rome is"), "sampling_params": sampling}
    client.post("/inference/v1/generate", body=body, cast_to=object)
    drive.expect(rollout, recorded=1)


def _gone(drive: Drive, rollout: str) -> None:
    """A client leaves in the middle of a stream, another one before its answer; then all goes well."""
    client = drive.clients.openai(rollout)
    endless = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
    messages = [user("Tell me a very long story.")]
    stream = client.chat.completions.create(messages=messages, stream=True, **endless, **drive.sampling())
    for _ in range(6):
        next(iter(stream))
    stream.close()
    with drive.refused("APITimeoutError", f"{rollout}: a call that is given up"):
        client.with_options(timeout=1.0).chat.completions.create(messages=messages, **endless, **drive.sampling())
    drive.chat(client, [user("Say hi to Ann")])
    drive.expect(rollout, recorded=1, aborted=2)


def _refused(drive: Drive, rollout: str) -> None:
    client = drive.clients.openai(rollout)
    with drive.refused("BadRequestError", f"{rollout}: a prompt that is too long"):
        drive.chat(client, [user("word " * 5000)])
    with drive.refused("NotFoundError", f"{rollout}: a model that is not there"):
        drive.chat(client, [user("Say hi")], model="another")
    with drive.refused("BadRequestError", f"{rollout}: alternatives without log-probs"):
        drive.chat(client, [user("Say hi")], top_logprobs=2)
    with drive.refused("NotFoundError", f"{rollout}: a model that is not there, in another dialect"):
        drive.clients.anthropic(rollout).messages.create(model="another", max_tokens=4, messages=[user("Say hi")])
    drive.chat(client, [user("Say hi to Ann")])
    drive.expect(rollout, recorded=1, no_generation=4)


def _controls(drive: Drive, rollout: str) -> None:
    """What samples nothing leaves no trace."""
    client = drive.clients.openai(rollout)
    drive.check([model.id for model in client.models.list()] == [MODEL], f"{rollout}: the list of models")
    messages: list[Any] = [user("Say hi")]
    count = drive.clients.anthropic(rollout).messages.count_tokens(model=MODEL, messages=messages)
    drive.check(count.input_tokens > 0, f"{rollout}: the count of tokens")
    client.post("/chat/completions/render", body={"model": MODEL, "messages": messages}, cast_to=object)
    drive.expect(rollout)


def _wishes(drive: Drive, rollout: str) -> None:
    """What the client itself asks for it gets."""
    client = drive.clients.openai(rollout)
    for stream, name in ((False, "Ann"), (True, "Bob")):
        drive.chat(client, [user(f"Say hi to {name}")], stream=stream, logprobs=True, top_logprobs=2)
        drive.chat(client, [user(f"Say bye to {name}")], stream=stream, extra_body={"return_token_ids": True})
    drive.chat(client, [user("Say hi to Cid")], stream=True, stream_options={"include_usage": True})
    drive.expect(rollout, recorded=5)


# ---- dialects that carry no ids


def other_dialects(drive: Drive) -> None:
    """Anthropic messages and Responses, which are asked as chat."""
    for temperature in (0.0, 1.0):
        for stream in (False, True):
            name = f"{'greedy' if temperature == 0 else 'sampled'}-{'streamed' if stream else 'whole'}"
            _messages(drive, f"messages-{name}", temperature, stream)
            _responses(drive, f"responses-{name}", temperature, stream)


def _messages(drive: Drive, rollout: str, temperature: float, stream: bool) -> None:
    client = drive.clients.anthropic(rollout)
    asked = {"model": MODEL, "max_tokens": 24, "system": SYSTEM, **at(temperature)}
    said: list[dict[str, Any]] = []
    for question in QUESTIONS:
        said.append(user(question))
        if stream:
            with client.messages.stream(messages=said, **asked) as events:
                text = "".join(events.text_stream)
        else:
            text = client.messages.create(messages=said, **asked).content[0].text
        # An empty text can't be sent back in this dialect.
        said.append({"role": "assistant", "content": text or "..."})
    stop: dict[str, Any] = {"stop_sequences": ["e, ", "3"], **at(temperature)}
    counting: list[Any] = [user("Count from one to ten, in words.")]
    answer = client.messages.create(model=MODEL, max_tokens=30, messages=counting, stream=stream, **stop)
    if stream:
        list(answer)
    drive.expect(rollout, recorded=len(QUESTIONS) + 1)


def _responses(drive: Drive, rollout: str, temperature: float, stream: bool) -> None:
    client = drive.clients.openai(rollout)
    asked = {"max_output_tokens": 24, "instructions": SYSTEM, "store": False}
    asked |= {"model": MODEL, "temperature": temperature}
    items: list[Any] = []
    for question in QUESTIONS:
        items.append(user(question))
        if stream:
            *_, last = client.responses.create(input=items, stream=True, **asked)
            output = last.response.output
        else:
            output = client.responses.create(input=items, **asked).output
        items += [item.model_dump(exclude_none=True) for item in output]
    drive.expect(rollout, recorded=len(QUESTIONS))
