"""Ask a language model behind an OpenAI-compatible endpoint, and keep its replies on disk by content.

The key is only ever sent to the endpoint: it is in no file, message or representation. What a server says in an error
may repeat it and is dropped.
"""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
from tqdm import tqdm

from . import paths, store

BASE_URL, MODEL, KEY = VARIABLES = ("PSA_JUDGE_BASE_URL", "PSA_JUDGE_MODEL", "PSA_JUDGE_API_KEY")
PERMANENT = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)

SHORTEST_KEY = 8
"""Shorter keys are placeholders ("x", "none") for endpoints that want none, and may occur in any reply."""


class JudgeError(RuntimeError):
    """The endpoint cannot be used; the message says why, without the key, and replies so far are kept."""


class Endpoint:
    """A chat model at temperature 0.

    Args:
        base_url: e.g. ``http://localhost:8000/v1``.
        model: the endpoint's name of the model.
        api_key: any word, if the endpoint wants none.
        max_tokens: longest reply.
        concurrency: most calls at a time.
        retries: after a timeout, a lost connection, 408, 409, 429 or 5xx, with the client's exponential backoff.
        timeout: seconds for one call.

    Raises:
        ValueError: the key cannot be one.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str,
        *,
        max_tokens: int,
        concurrency: int = 8,
        retries: int = 5,
        timeout: float = 60.0,
    ) -> None:
        self.base_url, self.model, self.concurrency = base_url, model, concurrency
        self._request = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        self._key = api_key.strip()
        # An HTTP client that is given an illegal header names it, key and all, in its error.
        if not re.fullmatch(r"[!-~]+", self._key):
            raise ValueError(f"{KEY} is empty or holds characters that no key has (not shown); set it again")
        self._client = openai.OpenAI(base_url=base_url, api_key=self._key, max_retries=retries, timeout=timeout)

    def replies(self, prompts: Sequence[str]) -> list[str | None]:
        """The reply to each prompt, "" where the model kept silent; None where none came after all retries.

        A reply that was once received is never asked for again; equal prompts are asked once.

        Raises:
            JudgeError: key, model or address are refused, or the server is not there.
        """
        distinct = list(dict.fromkeys(prompts))
        with ThreadPoolExecutor(self.concurrency) as pool:
            found = tqdm(pool.map(self._reply, distinct), total=len(distinct), desc="judge", disable=None, leave=False)
            by_prompt = dict(zip(distinct, found, strict=True))
        return [by_prompt[prompt] for prompt in prompts]

    def _reply(self, prompt: str) -> str | None:
        key = store.key_of(base_url=self.base_url, prompt=prompt, **self._request)
        file = paths.cache() / "judge" / key[:2] / f"{key}.json"
        if (reply := _read(file)) is None and (reply := self._ask(prompt)) is not None:
            with paths.atomic(file) as temporary:
                temporary.write_text(json.dumps(reply))
        return reply

    def _ask(self, prompt: str) -> str | None:
        messages = [{"role": "user", "content": prompt}]
        try:
            response = self._client.chat.completions.with_raw_response.create(**self._request, messages=messages)
        except PERMANENT as error:
            raise JudgeError(f"the endpoint answered {error.status_code}; check {', '.join(VARIABLES)}") from None
        except (openai.APITimeoutError, openai.APIStatusError):
            return None
        except openai.APIConnectionError:
            raise JudgeError(f"no connection to {BASE_URL}; is the server up and the address right?") from None
        reply = _content(response.http_response.content)
        secret = len(self._key) >= SHORTEST_KEY
        return reply.replace(self._key, "[key]") if reply and secret else reply


def from_environment() -> tuple[str, str, str]:
    """Base URL, model and key from the environment.

    Raises:
        ValueError: names the variables that are not set.
    """
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        raise ValueError(f"{', '.join(missing)} not set; an endpoint judge needs all of {', '.join(VARIABLES)}")
    return os.environ[BASE_URL], os.environ[MODEL], os.environ[KEY]


def _content(body: bytes) -> str | None:
    """The text of a chat completion; None if the body is not one."""
    try:
        return str(json.loads(body)["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError):
        return None


def _read(file: Path) -> str | None:
    """A kept reply; None if it is absent or damaged."""
    try:
        reply = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return reply if isinstance(reply, str) else None
