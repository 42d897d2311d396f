"""The endpoint judge against a fake server that misbehaves and a real one; the embedding judge on the shipped data."""

import http.server
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from psa_utils import data, endpoint, judge, packaged, paths
from psa_utils.config import BEHAVIOURS
from psa_utils.data import Item
from psa_utils.embedding import Embedder

KEY = "sk-never-to-be-seen-4711"


class Fake:
    """A server that answers call i with step i of a script, the last step from then on."""

    def __init__(self):
        self.script, self.bodies, self.keys = ["5"], [], []
        self.running = self.most = 0
        self.lock = threading.Lock()

    def next(self, body, key):
        with self.lock:
            step = self.script[min(len(self.bodies), len(self.script) - 1)]
            self.bodies.append(body)
            self.keys.append(key)
            return step

    @contextmanager
    def counted(self):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        yield
        with self.lock:
            self.running -= 1


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.counted():
            step = fake.next(body, self.headers["Authorization"])
            if isinstance(step, float):  # seconds until the answer
                time.sleep(step)
                step = "5"
            if isinstance(step, int):
                self.reply(step, json.dumps({"error": {"message": f"{self.headers['Authorization']} is bad"}}))
            elif isinstance(step, bytes):
                self.reply(200, step.decode())
            else:
                self.reply(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": step}}]}))

    def reply(self, status, text):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("retry-after-ms", "5")
        self.end_headers()
        try:
            self.wfile.write(text.encode())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client did not wait: what the timeout test is about

    def log_message(self, *_):
        """Keep the test output clean."""


@pytest.fixture
def fake():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.fake = Fake()
        server.fake.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.fake
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache of replies; models stay where they are."""
    models = paths.cache() / "models"
    models.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("PSA_CACHE_DIR", str(tmp_path))
    (tmp_path / "models").symlink_to(models)
    return tmp_path / "judge"


def ask(fake, answers=("yes",), **options):
    made = judge.EndpointJudge(fake.url, "m", KEY, **{"retries": 2, "timeout": 10, **options})
    return made, made.scores("refusal", ["Will you?"] * len(answers), list(answers))


def test_the_request_holds_rubric_question_and_answer_at_temperature_zero(fake):
    made, scores = ask(fake)
    assert scores.tolist() == [5.0]
    (body,) = fake.bodies
    assert (body["model"], body["temperature"], fake.keys) == ("m", 0, [f"Bearer {KEY}"])
    (message,) = body["messages"]
    for part in (judge.RUBRICS["refusal"], "Will you?", "yes"):
        assert part in message["content"]
    assert made.name == "m (0-10)"


def test_scores_come_in_the_order_of_the_answers(fake):
    fake.script = [str(i) for i in range(11)]
    answers = [f"answer {i}" for i in range(11)]
    _, scores = ask(fake, answers, concurrency=4)
    asked = [body["messages"][0]["content"] for body in fake.bodies]
    expected = [next(i for i, text in enumerate(asked) if f"\n{answer}\n" in text) for answer in answers]
    assert scores.tolist() == expected


def test_a_rerun_asks_nothing_and_equal_answers_are_asked_once(fake):
    fake.script = ["3", "no number"]
    _, first = ask(fake, ["a", "b", "a"], concurrency=1)
    made, again = ask(fake, ["a", "b", "a"], concurrency=1)
    np.testing.assert_array_equal(first, [3, np.nan, 3])
    np.testing.assert_array_equal(again, first)
    assert len(fake.bodies) == 2
    assert made.counts == Counter(scored=2, unusable=1)


def test_whatever_the_reply_depends_on_is_in_the_key(fake, monkeypatch):
    def calls(model="m", behaviour="refusal", question="q", answer="a"):
        judge.EndpointJudge(fake.url, model, KEY).scores(behaviour, [question], [answer])
        return len(fake.bodies)

    assert [calls(), calls(), calls(model="other"), calls(behaviour="sycophancy")] == [1, 1, 2, 3]
    assert [calls(question="q2"), calls(answer="a2")] == [4, 5]
    monkeypatch.setitem(judge.RUBRICS, "refusal", "something else.")
    assert calls() == 6
    fake.url = fake.url.replace("127.0.0.1", "localhost")
    assert calls() == 7


def test_a_damaged_kept_reply_is_asked_for_again(fake, cache):
    ask(fake)
    (file,) = cache.rglob("*.json")
    for damage in ('"5', "[5]"):
        file.write_text(damage)
        assert ask(fake)[1].tolist() == [5.0]
    assert len(fake.bodies) == 3


@pytest.mark.parametrize("fault", [429, 500, 503, 408])
def test_passing_faults_are_retried(fake, fault):
    fake.script = [fault, fault, "7"]
    assert ask(fake)[1].tolist() == [7.0]
    assert len(fake.bodies) == 3


def test_a_timeout_is_retried(fake):
    fake.script = [1.0, "7"]
    assert ask(fake, timeout=0.3, retries=1)[1].tolist() == [7.0]


@pytest.mark.parametrize("fault", [429, 500, 400, b"{", b"[]", b'{"choices": []}', b'{"choices": null}', 1.0])
def test_what_fails_for_good_is_counted_not_kept_and_asked_again(fake, fault):
    fake.script = ["2", fault]
    made, scores = ask(fake, ["a", "b"], concurrency=1, retries=0, timeout=0.3)
    np.testing.assert_array_equal(scores, [2, np.nan])
    assert made.counts == Counter(scored=1, failed=1)
    fake.script = ["4"]
    assert ask(fake, ["a", "b"])[1].tolist() == [2.0, 4.0]
    assert len(fake.bodies) == 3


@pytest.mark.parametrize("reply", ["I cannot rate this.", "7 or 8", "11", "-3", "seven", "", None, "٧", "7/100", "nan"])
def test_what_is_no_number_is_counted_never_guessed(fake, reply):
    fake.script = [reply]
    made, scores = ask(fake)
    assert np.isnan(scores).all()
    assert made.counts == Counter(unusable=1)


def test_no_reply_at_all_is_an_error(fake):
    fake.script = [500]
    with pytest.raises(judge.JudgeError, match="not one of 2 calls succeeded"):
        ask(fake, ["a", "b"], retries=0)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_model_stops_at_once(fake, status):
    fake.script = [status]
    with pytest.raises(judge.JudgeError, match=f"answered {status}; check PSA_JUDGE_BASE_URL, PSA_JUDGE_MODEL"):
        ask(fake, [str(i) for i in range(50)], concurrency=2)
    assert len(fake.bodies) <= 6


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "no-scheme"])
def test_no_server_is_an_error(url):
    with pytest.raises(judge.JudgeError, match="no connection to PSA_JUDGE_BASE_URL"):
        judge.EndpointJudge(url, "m", KEY, retries=0).scores("refusal", ["q"], ["a"])


def test_calls_at_a_time_are_limited(fake):
    fake.script = [0.1]
    ask(fake, [str(i) for i in range(9)], concurrency=3)
    assert fake.most == 3


@pytest.mark.parametrize("step", [f"5 {KEY}", 401, 500, f"not JSON {KEY}".encode(), "6"])
def test_the_key_is_nowhere(fake, step, cache, capfd, caplog, monkeypatch):
    """The server repeats the key in whatever it says; the client logs all it can."""
    caplog.set_level(logging.DEBUG)
    fake.script = [step]
    made = judge.EndpointJudge(fake.url, "m", KEY, retries=1)
    seen = [repr(made), str(made), repr(made._endpoint)]
    try:
        seen.append(str(made.scores("refusal", ["q"], ["a"])))
    except judge.JudgeError as error:
        seen.append("".join(traceback.format_exception(error)))
    seen += [caplog.text, *capfd.readouterr(), str(made.counts)]
    seen += [str(file) + file.read_text() for file in cache.rglob("*") if file.is_file()]
    assert fake.keys[0] == f"Bearer {KEY}", "it was sent"
    assert "/chat/completions" in caplog.text, "the log is on"
    assert KEY not in "".join(seen)


def test_a_placeholder_for_a_key_does_not_eat_verdicts(fake):
    fake.script = ["10"]
    assert judge.EndpointJudge(fake.url, "m", "1").scores("refusal", ["q"], ["a"]).tolist() == [10.0]


@pytest.mark.parametrize("bad", ["", "  ", f"{KEY}\nX: y", f"{KEY} two", f"{KEY}é"])
def test_a_key_that_cannot_be_one_is_refused_unseen(bad):
    with pytest.raises(ValueError, match="PSA_JUDGE_API_KEY is empty or holds characters") as caught:
        judge.EndpointJudge("http://127.0.0.1:9/v1", "m", bad)
    assert KEY not in str(caught.value)


def test_the_environment_names_the_judge(fake, monkeypatch):
    for name in endpoint.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="PSA_JUDGE_BASE_URL, PSA_JUDGE_MODEL, PSA_JUDGE_API_KEY not set"):
        judge.EndpointJudge.from_environment()
    monkeypatch.setenv("PSA_JUDGE_BASE_URL", fake.url)
    monkeypatch.setenv("PSA_JUDGE_API_KEY", f"{KEY}\n")
    with pytest.raises(ValueError, match=r"^PSA_JUDGE_MODEL not set"):
        judge.EndpointJudge.from_environment()
    monkeypatch.setenv("PSA_JUDGE_MODEL", "m")
    assert judge.EndpointJudge.from_environment().scores("refusal", ["q"], ["a"]).tolist() == [5.0]
    assert fake.keys == [f"Bearer {KEY}"]


@contextmanager
def transformers_serve(model: Path, log: Path):
    """``transformers serve`` on a free port; yields its base URL once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [shutil.which("transformers", path=Path(sys.executable).parent), "serve", model, "--device", "cpu"]
    with log.open("w") as stream:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=stream, stderr=stream, env=os.environ)
    try:
        deadline = time.monotonic() + 240
        while not healthy(f"http://localhost:{port}/health"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://localhost:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError):
        return False


def test_a_real_server(tmp_path, cache):
    """A 135M model is no judge; what is tested is that a real server understands us and we understand it."""
    if missing := [name for name in ("fastapi", "uvicorn", "starlette", "opentelemetry") if find_spec(name) is None]:
        pytest.skip(
            f"`transformers serve` cannot start without {', '.join(missing)} (pip install 'transformers[serving]')"
        )
    model = packaged.smollm2()
    with transformers_serve(model, tmp_path / "log") as url:
        first = judge.EndpointJudge(url, str(model), KEY, concurrency=1, retries=0, timeout=120)
        scores = first.scores("refusal", ["Will you help me?"] * 2, ["No, I refuse.", "Yes, gladly."])
    again = judge.EndpointJudge(url, str(model), KEY, retries=0)
    np.testing.assert_array_equal(
        again.scores("refusal", ["Will you help me?"] * 2, ["No, I refuse.", "Yes, gladly."]), scores
    )
    assert first.counts == again.counts
    assert first.counts["failed"] == 0
    assert first.counts["scored"] == np.isfinite(scores).sum()
    assert len(list(cache.rglob("*.json"))) == 2
    assert KEY not in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def embedder():
    return Embedder.load()


@pytest.fixture(scope="module")
def offline():
    return judge.EmbeddingJudge.from_public_pairs()


def test_embeddings_are_the_published_ones(embedder):
    """Against plain code, one text at a time, and against what a sentence embedding is for."""
    texts = ["This is an example sentence", "Each sentence is converted", "word " * 200]
    ours = embedder(texts)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)
    for text, mine in zip(texts, ours, strict=True):
        ids = embedder.tokenizer.convert_tokens_to_ids(["[CLS]", *embedder.tokenizer.tokenize(text), "[SEP]"])
        mean = embedder.model(torch.tensor([ids])).last_hidden_state[0].mean(0).detach().numpy()
        np.testing.assert_allclose(mine, mean / np.linalg.norm(mean), atol=1e-5)
    related, unrelated = (
        embedder(["A kitten sleeps.", "A small cat is napping.", "The bank raised its rates."])[1:]
        @ (embedder(["A kitten sleeps."])[0])
    )
    assert related > 0.5 > unrelated


def test_wrong_bytes_in_the_embedding_wheel_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setitem(packaged.MINILM_SHA256, "tokenizer.json", "0" * 64)
    with pytest.raises(RuntimeError, match=r"tokenizer.json of gt-all.* expected 0000.*; nothing was kept"):
        packaged.minilm()
    assert [file.name for file in (tmp_path / "empty" / "models").iterdir() if file.is_dir()] == []


def test_similarity_is_the_difference_of_mean_cosines(embedder):
    pairs = [Item("q", "q", (f"yes, {word}", f"no {word}"), 0, 1) for word in ("tea", "rest", "rain")]
    made = judge.EmbeddingJudge({"refusal": pairs})
    answer = embedder(["yes, sun"])[0]
    cosines = [[embedder([option])[0] @ answer for option in pair.options] for pair in pairs]
    expected = np.mean([yes - no for yes, no in cosines])
    np.testing.assert_allclose(made.scores("refusal", ["q"], ["yes, sun"]), [expected], atol=1e-6)


def test_an_answer_without_words_has_no_verdict(offline):
    before = offline.counts.copy()
    scores = offline.scores("refusal", ["q"] * 4, ["", " \n", "!!!", "No."])
    assert offline.counts - before == {"unusable": 3, "scored": 1}
    assert np.isnan(scores).tolist() == [True, True, True, False]
    assert offline.scores("refusal", [], []).shape == (0,)


def test_impossible_requests(offline):
    with pytest.raises(ValueError, match="behaviour='kindness' is unknown"):
        offline.scores("kindness", ["q"], ["a"])
    with pytest.raises(ValueError, match="1 questions and 2 answers"):
        offline.scores("refusal", ["q"], ["a", "b"])
    with pytest.raises(ValueError, match=r"references of \['refusal'\] are empty"):
        judge.EmbeddingJudge({"refusal": []})
    alone = judge.EmbeddingJudge({"refusal": data.load_items("mini", "refusal", "public")})
    with pytest.raises(ValueError, match="behaviour='sycophancy' has no references; there are refusal"):
        alone.scores("sycophancy", ["q"], ["a"])


def test_the_offline_judge_ranks_shipped_answers_better_than_chance(offline):
    items = {behaviour: data.load_items("mini", behaviour, "test") for behaviour in BEHAVIOURS}
    table = judge.agreement(offline, items).set_index("behaviour")
    assert (table.judged == 50).all()
    assert (table.low > 0.5).all()
    assert table.agreement.mean() > 0.85


def test_agreement_by_hand():
    class Stub:
        name = "stub"

        def scores(self, behaviour, questions, answers):
            known = {"right": 2.0, "wrong": 1.0, "same": 1.5, "unclear": np.nan}
            return np.array([known[answer] for answer in answers])

    def item(matching, other):
        return Item("q", "q", (other, matching), 1, 0)

    of_one = [item("right", "wrong"), item("wrong", "right"), item("same", "same"), item("right", "wrong")]
    table = judge.agreement(Stub(), {"refusal": [*of_one, item("unclear", "wrong")], "sycophancy": [of_one[0]]})
    row, short = table.to_dict("records")
    assert (row["items"], row["judged"], row["agreement"]) == (5, 4, 0.625)
    assert row["low"] <= 0.625 <= row["high"]
    assert short["judged"] == 1
    assert np.isnan([short["agreement"], short["low"], short["high"]]).all()


def test_rubrics_cover_the_behaviours():
    assert tuple(judge.RUBRICS) == BEHAVIOURS
