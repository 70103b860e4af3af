"""The server of the live page: who may ask, how much, and what happens to what is hostile."""

import http.client
import json
import socket
import threading
import time
import zlib

import pytest

pytest.importorskip("starlette", reason="the live page needs pip install 'tamis[explore]'")
pytest.importorskip("uvicorn", reason="the live page needs pip install 'tamis[explore]'")

from report.live.models import subjects
from tamis.report.live.guard import Rate, refusal
from tamis.report.live.looking import Limits
from tamis.report.live.server import Bounds, LiveServer, application

BOUNDS = Bounds(seconds=1.0, body=4096, characters=600, at_once=400, per_second=400.0)


@pytest.fixture(scope="module")
def server():
    with LiveServer(application(subjects(), Limits(tokens=200, written=8), BOUNDS), bounds=BOUNDS) as running:
        yield running


def port_of(server):
    return int(server.address.rstrip("/").rpartition(":")[2])


def asked(server, method="POST", path="/api/look", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
    try:
        given = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection.request(method, path, data, given)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_it_answers_and_gives_weights(server):
    status, body, headers = asked(server, body={"run": 0, "text": "the old man"})
    found = json.loads(body)
    assert status == 200, body
    assert found["source"]["segments"][0][0] == "the"
    assert headers["cache-control"] == "no-store"
    site, about = next(iter(found["sites"].items()))
    status, packed, _ = asked(server, "GET", f"/api/weights/{found['id']}/{site}")
    assert status == 200
    heads, queries, _ = about["shape"]
    raw = zlib.decompress(packed)
    counts = [int.from_bytes(raw[4 + 2 * k : 6 + 2 * k], "little") for k in range(heads * queries)]
    assert [sum(counts[head * queries : (head + 1) * queries]) for head in range(heads)] == about["kept"]
    assert asked(server, "GET", f"/api/weights/nothing/{site}")[0] == 410


def test_the_page_may_ask_its_server_alone(server):
    status, body, headers = asked(server, "GET", "/")
    assert status == 200
    assert b"connect-src 'self'" in body
    assert b"default-src 'none'" in body
    assert headers["x-frame-options"] == "DENY"
    assert headers["access-control-allow-origin"] is None
    assert headers["server"] is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil.example:1"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost:99999999"},
        {"Host": ""},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
    ],
    ids=str,
)
def test_others_may_not_ask(server, headers):
    status, body, _ = asked(server, body={"run": 0, "text": "the old man"}, **headers)
    assert status == 403
    assert set(json.loads(body)) == {"error"}


def test_who_may_ask():
    for host in ("localhost", "localhost:9000", "127.0.0.1:80", "[::1]:1234", "LOCALHOST:1"):
        assert refusal("GET", "/", {"host": host}) is None
        assert refusal("GET", "/", {"host": host, "origin": f"http://{host}"}) is None
        assert refusal("GET", "/", {"host": host, "origin": "http://localhost:1111"}) is not None
    followed = {"host": "localhost:1", "sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}
    assert refusal("GET", "/", followed) is None, "a link to the page"
    assert refusal("GET", "/api/weights/x/y", followed) is not None
    assert refusal("GET", "/", {**followed, "sec-fetch-dest": "iframe"}) is not None
    assert refusal("GET", "/", {}) is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 4000, "JSON"),
        (b"[1]", "fields"),
        ({"run": 0, "text": "a", "code": "print(1)"}, "fields"),
        ({"run": 9, "text": "a"}, "run must be"),
        ({"run": True, "text": "a"}, "run must be"),
        ({"run": 0, "text": 5}, "text must be a string"),
        ({"run": 0, "text": " \n"}, "no text yet"),
        ({"run": 0, "text": "a\0b"}, "NUL"),
        (b'{"run": 0, "text": "\\ud800"}', "surrogate"),
        ({"run": 0, "text": "x" * 601}, "may have 600 characters"),
        ({"run": 0, "text": "word " * 110}, "may have 200 tokens"),
        ({"run": 3, "text": "1 2 eleven"}, "type numbers from 0 to 10"),
        ({"run": 0, "text": "a", "silent": [["nowhere", 0]]}, "did you mean"),
        ({"run": 0, "text": "a", "silent": [["encoder.0.self", -1]]}, "has heads 0 to 3"),
        ({"run": 0, "text": "a", "silent": "all"}, "list"),
        ({"run": 0, "text": "a", "alphas": [["encoder.0.self", 0, 7]]}, "alpha must lie"),
        (b'{"run": 0, "text": "a", "alphas": [["encoder.0.self", 0, NaN]]}', "alpha must lie"),
        ({"run": 1, "text": "a", "alphas": [["encoder.0.self", 0, 1.5]]}, "no alpha to change"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused_with_a_message(server, body, message):
    status, found, _ = asked(server, body=body)
    assert status == 400, found
    assert message in json.loads(found)["error"]


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.harm=1</script>", "\u05e9\u05dc\u05d5\u05dd \u202e abc", "\U0001f469\u200d\U0001f680 hi",
        "\ufeff a", "\u3053\u3093",
    ],
)  # fmt: skip
def test_odd_text_comes_back_as_it_was_typed(server, text):
    status, body, _ = asked(server, body={"run": 0, "text": text})
    assert status == 200, body
    assert "".join(part for part, _ in json.loads(body)["source"]["segments"]) == text


def test_a_megabyte_is_refused(server):
    status, body, _ = asked(server, body=b'{"text": "' + b"x" * 1_000_000)
    assert status == 413
    assert "4,096 bytes" in json.loads(body)["error"]


def raw(server, data):
    """What comes back, and after how many seconds the connection is closed."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(4096):
            found += part
    return found, time.monotonic() - began


def test_who_dawdles_is_not_waited_for(server):
    found, seconds = raw(server, b"POST /api/look HT")
    assert found == b""
    assert seconds < 10.0
    lines = (
        "POST /api/look HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Content-Length: 50",
        "",
        "",
    )
    found, seconds = raw(server, "\r\n".join(lines).encode() + b'{"run": 0')
    assert b"408" in found.split(b"\r\n")[0]
    assert seconds < 10.0


def test_large_headers_are_refused(server):
    found, _ = raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
    assert b"400" in found.split(b"\r\n")[0] or found == b""


def test_other_addresses_and_methods_are_not_there(server):
    assert asked(server, "GET", "/api/look")[0] == 405
    assert asked(server, "GET", "/../../etc/passwd")[0] == 404
    assert asked(server, "DELETE", "/")[0] == 405


def test_it_listens_on_loopback_alone(server):
    assert server.address.startswith("http://127.0.0.1:")
    assert server._socket.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(OSError, match=f"port {port_of(server)} of this machine cannot be had"):
        LiveServer(application(subjects()[:1]), port_of(server))


def test_ten_clients_get_their_own_answers(server):
    texts = [f"the old man {'reads ' * number}" for number in range(10)]
    found = {}

    def ask(number):
        for _ in range(3):
            status, body, _ = asked(server, body={"run": number % 2, "text": texts[number]})
            found.setdefault(number, []).append((status, body))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answers in found.items():
        assert [status for status, _ in answers] == [200] * 3
        for _, body in answers:
            assert "".join(part for part, _ in json.loads(body)["source"]["segments"]) == texts[number]


def test_too_many_at_once_are_told_so():
    bounds = Bounds(per_second=0.01, at_once=3)
    with LiveServer(application(subjects()[:1], bounds=bounds), bounds=bounds) as server:
        assert [asked(server, "GET", "/")[0] for _ in range(5)] == [200, 200, 200, 429, 429]


def test_a_rate_is_refilled():
    rate = Rate(per_second=50.0, at_once=2)
    assert [rate.take() for _ in range(3)] == [True, True, False]
    time.sleep(0.05)
    assert rate.take()


def test_only_the_latest_weights_are_kept():
    bounds = Bounds(kept_bytes=1)
    with LiveServer(application(subjects()[:1], bounds=bounds), bounds=bounds) as server:
        names = [json.loads(asked(server, body={"run": 0, "text": text})[1])["id"] for text in ("the", "old")]
        found = [asked(server, "GET", f"/api/weights/{name}/encoder.0.self")[0] for name in names]
        assert found == [410, 200]
