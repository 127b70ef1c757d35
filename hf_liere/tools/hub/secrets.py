"""Secrets in the texts to publish that have no form of their own: the names that they are given to betray them."""

import re
from collections.abc import Iterator

from ...storage.client import TOKEN


# Words of any tokenizer.
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt")
NAMES = (
    r"(?:pass(?:word|wd|phrase|code)|(?:smtp|mail|ftp|db|user|admin|root)[_-]?pass|pwd|secret|credentials?|authorization"
    r"|(?:api|access|secret|private|account|auth|encryption|signing|wandb|comet|neptune|openai)[_-]?key"
    r"|(?:api|access|auth|bearer|bot|deploy|hf|hub|id|refresh|secret|session)[_-]?token)"
)
# Quoted values, or others with a digit, which no name of a variable is likely to have in such a place.
VALUE = r"""(?:"([^"\n]{4,})"|'([^'\n]{4,})'|((?=[^\s"',;()\[\]{}<>]*\d)[^\s"',;()\[\]{}<>]{6,}))"""
# In code and json, also where an object has a name and a value; and on a command line, also as a list of its words.
ASSIGNED = rf"""(?i){NAMES}["']?\s*(?::=|=|:|,\s*["']value["']\s*:)\s*\[?\s*{VALUE}"""
GIVEN = rf"""(?i)--[\w-]*{NAMES}["']?[\s,]+{VALUE}"""
# Any other key or token is a secret if its value looks like one.
RANDOM = r"(?=[\w+/=-]*\d)(?=[\w+/=-]*[A-Za-z])[\w+/=-]{20,}"
OTHER = rf"""(?i)--[\w-]*(?:key|token)["']?[=\s,]\s*["']?({RANDOM})|(?:key|token)["']\s*:\s*["']({RANDOM})["']"""
IN_ADDRESS = r"[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]*:([^\s/@\"'<>]+)@"
PLACES = [re.compile(pattern) for pattern in (ASSIGNED, GIVEN, OTHER, IN_ADDRESS)]
PLACEHOLDER = re.compile(
    r"(?i:none|null|true|false|str|your.*|x+|[.…*]+|example.*|changeme|password|pass|redacted|os\.(?:environ|getenv).*)"
    r"|[<\[{$%].*|[A-Z][A-Z_]*"
)
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
BREAK = re.compile(r"""["']?[ \t]*[\\+,]?[ \t]*(?:\r?\n|\\n)[ \t]*["']?""")
BROKEN_TOKEN = re.compile(rf"""\b(?=(?:hf|api_org)_)\w*(?:{BREAK.pattern})\w+""")


def readings(text: str) -> Iterator[str]:
    """A text as it is, and without escapes of characters, as in json that is a string in another."""
    yield text
    plain = re.sub(r"""\\+(["'/])""", r"\1", ESCAPED.sub(lambda found: chr(int(found[1] or found[2], 16)), text))
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
    values = (value for place in PLACES for found in place.finditer(text) for value in found.groups() if value)
    return None if all(map(PLACEHOLDER.fullmatch, values)) else "a secret (a password or key)"
