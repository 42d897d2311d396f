"""`make data` against a local server that also misbehaves."""

import hashlib
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from psa_utils import download

CONTENT = bytes(range(256)) * 2000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT at any path; the first folder of the path chooses the misbehaviour."""

    protocol_version = "HTTP/1.1"
    requests: list[tuple[str, str | None]] = []  # noqa: RUF012

    def log_message(self, *args):
        pass

    def do_GET(self):
        mode, wanted = self.path.split("/")[1], self.headers.get("Range")
        self.requests.append((mode, wanted))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and mode != "no-range" else 0
        if mode == "missing":
            return self.answer(404, b"")
        if start >= len(CONTENT):
            return self.answer(416, b"")
        body = CONTENT[start:][::-1] if mode == "wrong" else CONTENT[start:]
        if mode == "truncated" and start == 0:
            return self.answer(206, body, send=body[:100_000])
        if mode == "stall" and start == 0:
            return self.answer(206, body, send=body[:50_000], wait=1.5)
        return self.answer(206 if start else 200, body)

    def answer(self, status, body, send=None, wait=0.0):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if send is None else send)
        self.wfile.flush()
        time.sleep(wait)
        self.close_connection = send is not None


@pytest.fixture
def server():
    Server.requests.clear()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "deep" / "file.json"


def test_fetches_checks_and_does_not_fetch_again(server, target):
    for _ in range(2):
        download.fetch(f"{server}/good/f", target, DIGEST)
    assert target.read_bytes() == CONTENT
    assert len(Server.requests) == 1
    assert [p.name for p in target.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("mode", ["truncated", "stall"])
def test_an_interrupted_download_resumes(server, target, mode):
    with pytest.raises(download.DownloadError, match="kept and will be resumed"):
        download.fetch(f"{server}/{mode}/f", target, DIGEST, timeout=0.5)
    assert not target.exists()
    part = target.with_name("file.json.part")
    have = part.stat().st_size
    assert 0 < have < len(CONTENT)
    download.fetch(f"{server}/{mode}/f", target, DIGEST, timeout=0.5)
    assert target.read_bytes() == CONTENT
    assert Server.requests[-1] == (mode, f"bytes={have}-")


def test_a_server_without_ranges_starts_over(server, target):
    target.parent.mkdir()
    target.with_name("file.json.part").write_bytes(b"old beginning")
    download.fetch(f"{server}/no-range/f", target, DIGEST)
    assert target.read_bytes() == CONTENT


def test_a_whole_part_only_needs_its_digest(server, target):
    target.parent.mkdir()
    target.with_name("file.json.part").write_bytes(CONTENT)
    download.fetch(f"{server}/good/f", target, DIGEST)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(("mode", "message"), [("wrong", "refused, .* is untouched"), ("missing", "answered 404")])
def test_a_bad_answer_leaves_what_was_there(server, target, mode, message):
    target.parent.mkdir()
    target.write_bytes(b"what was there")
    with pytest.raises(download.DownloadError, match=message):
        download.fetch(f"{server}/{mode}/f", target, DIGEST)
    assert target.read_bytes() == b"what was there"
    if mode == "wrong":
        assert [p.name for p in target.parent.iterdir()] == ["file.json"]


def test_no_server(target):
    with pytest.raises(download.DownloadError, match="ConnectionError"):
        download.fetch("http://127.0.0.1:9/f", target, DIGEST, timeout=1)


def test_fetch_all_names_every_failure_and_keeps_the_rest(server, tmp_path, monkeypatch):
    files = [download.Remote(DIGEST, "c0ffee", "a.json"), download.Remote("0" * 64, "c0ffee", "b/c.json")]
    monkeypatch.setattr(download, "pinned", lambda: files)
    with pytest.raises(download.DownloadError, match=r"1 file\(s\) failed.*\n.*c0ffee/datasets/b/c.json"):
        download.fetch_all(tmp_path, base_url=f"{server}/good")
    assert (tmp_path / "a.json").read_bytes() == CONTENT
    assert not (tmp_path / "b" / "c.json").exists()


def test_command_line_exits_with_the_reason(server, tmp_path):
    command = [sys.executable, "-m", "psa_utils.download", "--target", str(tmp_path), "--base-url", f"{server}/missing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "23 file(s) failed; run `make data` again" in done.stderr
    assert "Traceback" not in done.stderr


def test_pinned_digests_are_those_of_the_public_files():
    from tests.test_data import CAA

    if not CAA.exists():
        pytest.skip("the CAA files are not here: set PSA_DATA_DIR")
    for file in download.pinned():
        assert hashlib.sha256((CAA / file.name).read_bytes()).hexdigest() == file.sha256
