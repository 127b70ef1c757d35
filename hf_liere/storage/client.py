"""Shared by publishing and pulling: retries, and one-sentence errors."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PureWindowsPath
from typing import TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers
from transformers.utils import logging

from ..errors import InputError


logger = logging.get_logger(__name__)

Result = TypeVar("Result")

# Timeouts, refused and broken connections, whose class is httpx's in huggingface_hub 1 and httpx2's in version 2.
TransportError = HfHubHTTPError.__bases__[0]
TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
ATTEMPTS = 5
LONGEST_WAIT = 600
# Tokens of users and of organisations, but not the x of examples.
TOKEN = re.compile(r"(hf|api_org)_(?!x+\b)[A-Za-z0-9]{20,}")


class HubError(RuntimeError):
    """The Hub refused a request or failed to answer it; the message says what to do and contains no token."""

    __str__ = InputError.__str__


class UnreachableError(HubError):
    """The Hub did not answer, or offline mode is set."""


def require_inside(name: str, what: str) -> str:
    """
    A name that becomes a path, of a file, folder or revision, with slashes. Raises [`HubError`] for one that leads
    elsewhere on any system.
    """
    path = PureWindowsPath(name)
    if not path.parts or path.anchor or ".." in path.parts:
        raise HubError(f"{what}={name!r} leads out of the repository; accepted are names in it, without '..'.")
    return path.as_posix()


def status_code(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help: overload, server errors, broken connections."""
    status = status_code(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    # The client's length check of downloads raises a plain OSError, known only by its message.
    return isinstance(error, TransportError) or "Consistency check failed" in str(error)


def seconds_to_wait(error: BaseException, attempt: int) -> float:
    """The delay that the response asks for (`Retry-After`, or the Hub's `RateLimit`), else 1, 2, 4, … seconds."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) and error.response is not None else {}
    after = headers.get("retry-after", "")
    if after.isdigit():
        return float(after)
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return float(2 ** (attempt - 1))


def wait_to_retry(error: BaseException, attempt: int, attempts: int = ATTEMPTS) -> None:
    """Sleep before the next attempt; raise an error that is permanent, the last, or asks for too long a wait."""
    if not is_transient(error) or attempt >= attempts:
        raise error
    seconds = seconds_to_wait(error, attempt)
    if seconds > LONGEST_WAIT:
        raise error
    reason = f"status {status_code(error)}" if status_code(error) else type(error).__name__
    logger.warning(f"The Hub answered with {reason}; attempt {attempt + 1} of {attempts} in {seconds:g} s.")
    time.sleep(seconds)


def retry(request: Callable[[], Result], attempts: int = ATTEMPTS) -> Result:
    """Make a request that is safe to repeat, with retries; returns its result."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return request()
        except Exception as error:
            wait_to_retry(error, attempt, attempts)


@contextmanager
def translate_hub_errors(api: HfApi, repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors of the client into [`HubError`], unchained because a traceback must not show requests."""
    if revision is not None:
        require_inside(revision, "revision")
    try:
        yield
    except HubError:
        raise
    except (OSError, TransportError, ValueError, RuntimeError) as error:
        explanation = _explanation(api, repo_id, revision, error)
        translated = type(explanation)(without_tokens(api, str(explanation)))
    else:
        return
    raise translated from None


def _explanation(api: HfApi, repo_id: str, revision: str | None, error: Exception) -> HubError:
    status, place = status_code(error), f"{repo_id} on {api.endpoint}"
    sign_in = "run `hf auth login`, or set HF_TOKEN"
    has_token = token_in_use(api) is not None
    if isinstance(error, RevisionNotFoundError):
        return HubError(f"{place} has no revision {revision!r}; {_known_revisions(api, repo_id)}.")
    if isinstance(error, GatedRepoError):
        how = "ask for access on its page" if has_token else f"{sign_in}, and ask for access on its page"
        return HubError(f"{place} is gated and access was not granted: {how}.")
    if status == 401 and has_token:
        return HubError(f"{api.endpoint} does not accept the token in use (expired or mistyped): {sign_in}.")
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        hidden = "the token in use may not see it" if has_token else f"no token is given: {sign_in}"
        return HubError(f"There is no {place}, or it is private and {hidden}.")
    if status == 403:
        return HubError(f"The token in use may not write to {place}: it is read-only or belongs to another account.")
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError(f"HF_HUB_OFFLINE is set, and {repo_id} is not (or not completely) in the local cache.")
    if status is not None:
        detail = getattr(error, "server_message", None) or f"status {status}"
        retried = f" after {ATTEMPTS} attempts" if status in TRANSIENT_STATUS else ""
        return HubError(f"{place} refused the request{retried}: {detail}.")
    if isinstance(error, (TransportError, LocalEntryNotFoundError)):
        return UnreachableError(
            f"{api.endpoint} did not answer ({type(error).__name__}), and {repo_id} is not (or not completely) in the "
            "local cache."
        )
    return HubError(f"{place}: {type(error).__name__}: {error}")


def token_in_use(api: HfApi) -> str | None:
    """The token that the client sends: its own, else that of the environment or `hf auth login`."""
    if api.token is False:
        return None
    return api.token if isinstance(api.token, str) else get_token()


def without_tokens(api: HfApi, text: str) -> str:
    token = token_in_use(api)
    return TOKEN.sub("hf_…", text.replace(token, "hf_…") if token else text)


def _known_revisions(api: HfApi, repo_id: str) -> str:
    try:
        references = api.list_repo_refs(repo_id)
    except Exception:
        return "accepted are branches, tags and commits"
    names = [reference.name for reference in (*references.branches, *references.tags)]
    return f"accepted are {', '.join(names)} and commits"
