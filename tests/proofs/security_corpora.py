"""Requests that want to be two, answers that want to be two, and ids that want to be paths; drawn from a seed."""

from __future__ import annotations

import random

__all__ = ("ID_PIECES", "SMUGGLED", "answers", "paths", "requests")

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


def _lines(text: str) -> tuple[bytes, ...]:
    """One piece a line, with the escapes of Python."""
    return tuple(line.encode().decode("unicode_escape").encode("latin-1") for line in text.strip().splitlines())


_TARGETS = _lines(r"""
/one
/one?x=1
http://other.test/one
HTTP://x@169.254.169.254/latest
//other.test/one
*
/%2e%2e/%2e%2e/etc/passwd
/..\\..
/a;b=c/../d
/%00
/%0d%0aGET%20/smuggled
/one HTTP/1.1
other.test:443
ftp://other.test/x
/ng-rollout/r-1/v1/models
/ng-rollout/r-1%2F..%2Fr-2/v1/models
/tokcap/../one
""")
_METHODS = (b"POST", b"GET", b"HEAD", b"OPTIONS", b"CONNECT", b"PUT", b"PRI", b"G\tET", b"post", b"GET\r\nx: y")
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.1 ", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"")
_FRAMING = _lines(r"""
content-length: 0
content-length: 4
content-length: 5
Content-Length:  4\x20
content-length: 4, 4
content-length: +4
content-length: 0x4
content-length: 1e1
content-length: -1
content-length:
content-length: 4\x0b
content-length : 4
 content-length: 4
content_length: 4
content-length\0: 4
content-length: 99999999999999999999
content-length: 4\r\n 0
content-length: \xd9\xa4
transfer-encoding: chunked
Transfer-Encoding: CHUNKED
transfer-encoding: xchunked
transfer-encoding: chunked, identity
transfer-encoding: gzip, chunked
transfer-encoding : chunked
transfer-encoding:\tchunked
transfer-encoding:\x0bchunked
transfer-encoding: chun\r\n ked
transfer-encoding: "chunked"
transfer-encoding: chunked;x=1
transfer-encoding: identity
x: y\ntransfer-encoding: chunked
x: y\rtransfer-encoding: chunked
transfer-encoding:\r\n chunked
""")
_OTHERS = (
    *_lines(r"""
host: other.test
host: x\r\nhost: y
host:
expect: 100-continue
expect: 200-ok
x: a\0b
connection: close
connection: keep-alive
connection: content-length
connection: transfer-encoding
connection: host, authorization
connection: upgrade\r\nupgrade: h2c
connection: upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAAA
upgrade: websocket
te: trailers
trailer: content-length
x-forwarded-for: 1.2.3.4\r\n 5
x: \r\n folded
x: a\x1b[31mb
: nameless
x y: z
x
\x00: x
keep-alive: timeout=1
proxy-connection: keep-alive
x-http-method-override: PUT
"""),
    b"x: " + b"y" * 70_000,
)
_BODIES = (
    *_lines(r"""
body
0\r\n\r\n
4\r\nbody\r\n0\r\n\r\n
4;ext="\r\n"\r\nbody\r\n0\r\n\r\n
4\nbody\n0\n\n
00000000000000000004\r\nbody\r\n0\r\n\r\n
-4\r\nbody\r\n0\r\n\r\n
0x4\r\nbody\r\n0\r\n\r\n
4 \r\nbody\r\n0\r\n\r\n
4\r\nbodyX\r\n0\r\n\r\n
ffffffffffffffff1\r\nbody\r\n0\r\n\r\n
4\r\nbody0\r\n\r\n
0\r\ncontent-length: 40\r\nx: y\r\n\r\n
\r\n\r\n
"""),
    b"",
    b"4\r\nbody\r\n0\r\n" + SMUGGLED,
)
_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r\n")
_ODD_BYTES = (b"\r\n", *(bytes([each]) for each in b"\r\n\0 \t\x0b\x0c:;,\x85\xa0\xff0"))


def requests(seed: int, number: int) -> bytes:
    """The bytes of a request, with another one behind."""
    draw = random.Random(f"requests/{seed}/{number}")
    pick = draw.choice
    end = pick(_ENDS)
    first = b" ".join((pick(_METHODS[:2] * 8 + _METHODS), pick(_TARGETS), pick(_VERSIONS[:1] * 12 + _VERSIONS)))
    others = [b"host: x"] if draw.random() < 0.9 else []
    others += draw.sample(_FRAMING, draw.choice((1, 1, 2, 2, 3))) + draw.sample(_OTHERS, draw.choice((0, 0, 1, 2)))
    draw.shuffle(others)
    raw = end.join([first, *others]) + end + end + pick(_BODIES) + SMUGGLED
    return _mutated(draw, raw) if draw.random() < 0.5 else raw


_STATUSES = _lines(r"""
200 OK
200
204 No
304 No
302 Found
500 X
099 X
100 Continue
101 Switch
600 X
2000 X
200 O\rK
""")
_ANSWERED = (
    *_lines(r"""
location: /x\r\nset-cookie: a=b
location: http://other.test/x\ty
location: /a\x0bb
location: /\xc3\xa9
location: //x/y
location: \\\\x
set-cookie: a\0b
x: a\r b
x: a\n b
x: \x1b[2J
content-type: text/event-stream
content-type: application/json
content-encoding: gzip
trailer: x
connection: close
connection: content-length
keep-alive: x
upgrade: websocket
x-tokcap-call-id: forged
"""),
    b"x:" + b"y" * 140_000,
)
_SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nsmuggled"


def answers(seed: int, number: int) -> bytes:
    """The bytes of an answer, often with another one behind."""
    draw = random.Random(f"answers/{seed}/{number}")
    pick = draw.choice
    end = pick(_ENDS)
    first = b"HTTP/1.1 " + pick(_STATUSES[:1] * 8 + _STATUSES)
    others = draw.sample(_FRAMING, draw.choice((0, 1, 1, 2, 2))) + draw.sample(_ANSWERED, draw.choice((0, 1, 1, 2)))
    draw.shuffle(others)
    raw = end.join([first, *others]) + end + end + pick(_BODIES) + pick((b"", _SECOND))
    return _mutated(draw, raw) if draw.random() < 0.5 else raw


def _mutated(draw: random.Random, raw: bytes) -> bytes:
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(raw) + 1)
        cut = draw.choice((0, 0, 1, 1, 2, 5))
        raw = raw[:at] + (draw.choice(_ODD_BYTES) if draw.random() < 0.8 else b"") + raw[at + cut :]
    return raw


ID_PIECES = _lines(r"""
r-1
a.b_c
..
.
/
//
\\
%2f
%2F
%252f
%2e%2e
%252e%252e
%c0%af
%c0%ae
%e2%80%ae
%ef%bc%8f
%d0%b0
%00
%0a
%0d%0a
%20
%3b
;a=b
~
%7e
%7E
+
@
:
*
$(id)
`id`
'
"
{}
%
%zz
%u002f
\xc3\xa9
\x1b[31m
ng-rollout
training-token-capture
CON
-rf
x1
0
""")


def paths(seed: int, number: int) -> bytes:
    """A path below the prefix, or nearly, as it could be sent: without spaces and control characters."""
    draw = random.Random(f"paths/{seed}/{number}")
    pieces = draw.choices(ID_PIECES, k=draw.choice((1, 1, 2, 3, 4)))
    if draw.random() < 0.03:
        pieces.append(draw.choice((b"x", b"%41")) * draw.choice((190, 200, 201, 10_000)))
    odd = (b"/%6eg-rollout/", b"//ng-rollout/", b"/ng-rollout//", b"/NG-rollout/")
    prefix = draw.choice((b"/ng-rollout/",) * 12 + odd)
    rest = draw.choice((b"/v1/chat/completions", b"", b"/", b"/../r-2/v1/chat/completions", b"/%2e%2e/r-2"))
    training = draw.choice((b"/training-token-capture", b"/training-token-capture", b"", b"/training%2Dtoken-capture"))
    path = prefix + b"".join(pieces) + training + rest
    return bytes(each for each in path if 0x21 <= each <= 0x7E and each not in b"?#")
