"""Secrets in the texts to publish that have no form of their own: the names that they are given to betray them."""

import json
import re
from collections.abc import Iterator
from typing import Any

from ...storage.client import TOKEN


# Words of any tokenizer.
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt")
NAMES = (
    r"(?:pass(?:word|wd|phrase|code)|(?:smtp|mail|ftp|db|user|admin|root)[_-]?pass|pwd|secret|credentials?|authorization"
    r"|(?:api|access|secret|private|account|auth|encryption|signing|wandb|comet|neptune|openai)[_-]?key"
    r"|(?:api|access|auth|bearer|bot|deploy|hf|hub|id|refresh|secret|session)[_-]?token)"
)
# Any other key or token is one if its value looks like it.
NAMED = re.compile(rf"(?i){NAMES}$")
OTHER_NAMED = re.compile(r"(?i)(?:key|token)$")
RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=-]{20,}")
# Quoted values, or others with a digit, which no name of a variable is likely to have in such a place.
VALUE = r"""(?:"([^"\n]{4,})"|'([^'\n]{4,})'|((?=[^\s"',;()\[\]{}<>]*\d)[^\s"',;()\[\]{}<>]{6,}))"""
ASSIGNED = re.compile(rf"""(?i){NAMES}["']?\s*(?::=|=|:)\s*{VALUE}|--[\w-]*{NAMES}\s+{VALUE}""")
OTHER_ASSIGNED = re.compile(rf"(?i)--[\w-]*(?:key|token)[=\s]\s*[\"']?({RANDOM.pattern})")
IN_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]*:([^\s/@\"'<>]+)@")
PLACEHOLDER = re.compile(
    r"(?i:none|null|true|false|str|your.*|x+|[.…*]+|example.*|changeme|password|pass|redacted|os\.(?:environ|getenv).*)"
    r"|[<\[{$%].*|[A-Z][A-Z_]*"
)
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
BREAK = re.compile(r"""["']?[ \t]*[\\+,]?[ \t]*(?:\r?\n|\\n)[ \t]*["']?""")
BROKEN_TOKEN = re.compile(rf"""\b(?=(?:hf|api_org)_)\w*(?:{BREAK.pattern})\w+""")


def readings(text: str) -> Iterator[str]:
    """A text as it is, and without escapes of characters."""
    yield text
    plain = ESCAPED.sub(lambda found: chr(int(found[1] or found[2], 16)), text).replace("\\/", "/")
    if plain != text:
        yield plain


def find_named_secret(name: str, text: str) -> str | None:
    """Names the kind of secret in a file of this name and text, without its value; `None` if there is none."""
    mended = (BREAK.sub("", broken[0]) for broken in BROKEN_TOKEN.finditer(text))
    # Words of two lines make up less.
    if any(TOKEN.match(whole) and len(whole) > 32 for whole in mended):
        return "a token"
    if name in VOCABULARIES:
        return None
    found = [value for match in ASSIGNED.finditer(text) for value in match.groups() if value]
    found += OTHER_ASSIGNED.findall(text) + IN_ADDRESS.findall(text)
    if name.endswith(".json"):
        for given, value in _named_strings(_parse(text)):
            if NAMED.search(given) or (OTHER_NAMED.search(given) and RANDOM.fullmatch(value)):
                found.append(value)
            elif inner := find_named_secret("" if _parse(value) is None else name, value):
                return inner
    secret = next((value for value in found if value and not PLACEHOLDER.fullmatch(value)), None)
    return None if secret is None else "a secret (a password or key)"


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _named_strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names and texts in a JSON value; a list is also read as a command line."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _named_strings(inner, key)
        named = value.get("name", value.get("key"))
        if isinstance(named, str) and isinstance(value.get("value"), str):
            yield named, value["value"]
    elif isinstance(value, list):
        for inner in value:
            yield from _named_strings(inner, name)
        yield "", " ".join(inner for inner in value if isinstance(inner, str))
