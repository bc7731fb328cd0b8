"""The page at / needs nothing but its server, and runs nothing but its own script."""

import base64
import hashlib
import re

from fastapi.testclient import TestClient

from tests.support.servers import client_of


def test_it_loads_nothing_and_its_policy_names_its_own_script(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|innerHTML|eval\(", reply.text)
    policy = reply.headers["content-security-policy"]
    for tag in ("script", "style"):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r'\sstyle="|\son[a-z]+="', reply.text), "the policy forbids these"


def test_the_page_needs_no_key_and_its_requests_are_understood(make, client: TestClient) -> None:  # type: ignore[no-untyped-def]
    assert client_of(make(keys=("k",))).get("/").status_code == 200
    text = client.get("/").text
    assert "return_token_origins: true" in text
    assert client.get("/health").json().keys() >= set(re.findall(r"state\.(\w+)", text))
