"""A page for a browser: what runs in it, whom it speaks to, and whose pages may read us."""

from __future__ import annotations

import asyncio
import base64
import hashlib

import pytest

from plumbing.service.browsers import Page, host_of
from tests.plumbing.service.test_http import serving

SCRIPT, STYLE = "\n'use strict';\n", "b { color: red }"
HTML = f"<!doctype html><style>{STYLE}</style><b>hello</b><script>{SCRIPT}</script>"


@pytest.fixture
def page(tmp_path) -> Page:
    path = tmp_path / "page.html"
    path.write_text(HTML)
    return Page.load(path)


async def ask(port: int, path: str, **headers: str) -> tuple[str, dict[str, str], bytes]:
    """One request with `headers`: (first line, headers, what there is of the body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [
        f"GET {path} HTTP/1.1",
        "Connection: close",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    body = b"" if path.startswith("/events") else await reader.read()
    writer.close()
    await writer.wait_closed()
    first, *rest = head.decode().strip().split("\r\n")
    return first, dict(line.split(": ", 1) for line in rest), body


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_page_is_served_with_a_policy_for_exactly_what_is_in_it(page: Page):
    """Goal: no foreign script, no other peer. Method: the header against hashes made here."""

    async def main():
        async with serving(pages={"ui": page}) as http:
            first, headers, body = await ask(http.port, "/ui", Host=f"127.0.0.1:{http.port}")
            assert " 200 " in first
            assert body == HTML.encode()
            assert headers["Content-Type"] == "text/html; charset=utf-8"
            policy = dict(
                each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; ")
            )
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == digest(SCRIPT)
            assert policy["style-src"] == digest(STYLE)
            assert policy["connect-src"] == "'self' http://127.0.0.1:*"
            _, _, index = await ask(http.port, "/", Host="x")
            assert b'"/ui"' in index

    asyncio.run(main())


@pytest.mark.parametrize("host", ["evil.example; script-src *", "a b", "", "a:b", "a:123456"])
def test_a_host_that_is_none_gets_no_say_in_the_policy(page: Page, host: str):
    """Goal: a request's Host cannot write a policy. Method: what no browser would send."""
    assert "connect-src 'self'; img" in page.headers(host)["Content-Security-Policy"]
    assert host_of(host) is None


@pytest.mark.parametrize(
    ("origin", "host", "may_read"),
    [
        ("http://127.0.0.1:9400", "127.0.0.1:9410", True),
        ("http://127.0.0.1", "127.0.0.1:9410", True),
        ("http://Node-7:9400", "node-7:9410", True),
        ("http://[::1]:9400", "[::1]:9410", True),
        ("http://evil.example", "127.0.0.1:9410", False),
        ("http://127.0.0.1.evil.example", "127.0.0.1:9410", False),
        ("http://localhost:9400", "127.0.0.1:9410", False),
        ("https://127.0.0.1:9400", "127.0.0.1:9410", False),
        ("null", "127.0.0.1:9410", False),
        ("http://", "127.0.0.1:9410", False),
        ("http://127.0.0.1:9400\x01", "127.0.0.1:9410", False),
    ],
)
def test_only_pages_of_the_same_host_may_read_what_is_served(origin, host, may_read):
    """Goal: /ui reads all parts, no page from elsewhere does. Method: both; answers and stream."""

    async def main():
        async with serving() as http:
            for path in ("/status", "/ready", "/events"):
                _, headers, _ = await ask(http.port, path, Host=host, Origin=origin)
                allowed = headers.get("Access-Control-Allow-Origin")
                assert allowed == (origin if may_read else None)
            _, headers, _ = await ask(http.port, "/status", Host=host)
            assert "Access-Control-Allow-Origin" not in headers

    if "\x01" in origin:  # such a request is refused before anything is asked of it
        assert host_of(origin.removeprefix("http://")) is None
    else:
        asyncio.run(main())
