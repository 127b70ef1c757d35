"""
Finds secrets by the names that they are assigned to (`password = …`), where a value has no form of its own.

Kingfisher knows the forms of services, and most tools for secrets know only these; names are searched here.
"""

import base64
import html
import re
from collections.abc import Iterator
from urllib.parse import unquote

from ...storage.client import TOKEN


# Words of any tokenizer.
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt")
NAMES = (
    r"(?:pass(?:word|wd|wort|phrase|code)|(?:smtp|mail|ftp|db|user|admin|root|mysql|redis)[_-]?pass|pwd|kennwort|secret"
    r"|credential|authorization|(?:api|access|secret|private|account|auth|encryption|signing|wandb|comet|neptune"
    r"|openai)[_-]?key|(?:api|access|auth|bearer|bot|deploy|hf|hub|id|refresh|secret|session)[_-]?token)s?"
    r"(?:_?\d+|_(?:prod|dev|live|value|string|text|plain))?"
)
# Quoted values, or others with a digit or sign, which no name or call in code is likely to have in such a place.
VALUE = (
    r"""(?:[bfru]{0,2}"(?:"")?(?![),\]}])([^"\n]{4,})"|[bfru]{0,2}'(?:'')?(?![),\]}])([^'\n]{4,})'"""
    r"""|(?!(?:self|cls|os|config|args|settings)\.|[\w.]+[(\[])"""
    r"""((?=[^\s"',;()\[\]{}<>]*[\d!@#^])[^\s"',;()\[\]{}<>]{6,}))"""
)
EQUALS = r"(?::[ \t]*[\w.\[\] |]+=(?!=)|:=|=>|=(?!=)|:)"
RANDOM = r"(?=[\w+/=.-]*\d)(?=[\w+/=.-]*[A-Za-z])[\w+/=.-]{16,500}"
# In code, also of a dictionary or environment, as a list or an annotation; in json and xml.
ASSIGNED = rf"""(?i){NAMES}(?:["']?\]?\s*{EQUALS}\s*[\[(]?\s*{VALUE}|["'],\s*["']({RANDOM}))"""
ASSIGNED += rf"""|<[\w:-]*{NAMES}>([^<\s]{{4,}})<"""
# Where an object has a name and a value, in any order.
NAMED = rf"""["']?\b(?:name|key|variable)["']?\s*[=:]\s*["']?[\w.-]*{NAMES}\b["']?"""
VALUED = rf"""["']?\bvalue["']?\s*[=:]\s*{VALUE}"""
PAIRED = rf"""(?i){NAMED}[^{{}}]{{1,120}}?{VALUED}|{VALUED}[^{{}}]{{1,120}}?{NAMED}"""
# On a command line, also as a list of its words, in a Dockerfile, for curl and in .netrc.
GIVEN = (
    rf"""(?im)(?:--[\w-]*|^\s*(?:ENV|ARG|setx?|setenv)\s+\w*){NAMES}["']?[\s,]+{VALUE}"""
    r"""|\blogin\s+\S+\s+password\s+(\S+)"""
    r"""|\bcurl\b.*?\s(?:-u|--user)[\s=]+["']?[\w.@-]+:([^\s"']{4,})"""
    r"""|\b(?:sshpass|mysql)\b.*?\s-p\s*["']?([^\s"']{4,})"""
    r"""|login\((?:["'][^"'\n]+["'],\s*|[^)\n]*(?:key|token)\s*=\s*)["']([^"'\n]{8,})"""
    r"""|"username":\s*"[^"]+",\s*"key":\s*"(\w+)"""
    r"""|\b[A-Z\d_]+_(?-i:KEY|TOKEN)["']?\]?\s*[=:]\s*["']?([\da-f]{32,})\b"""
)
IN_ADDRESS = r"[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]*:([^\s/@\"'<>]+)@"
KEY = r"(?<!\w)(A[KS]IA[0-9A-Z]{16})\b"
KEY += r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\[rn]|[\"',+])*([\w+/=:-]{16,})"
PLACES = [re.compile(pattern) for pattern in (ASSIGNED, PAIRED, GIVEN, IN_ADDRESS, KEY)]
# Any other key or token is a secret if its value looks like one.
OTHER = (
    rf"""(?i)(?:key(?<!public[_-]key)(?<!publickey)|token|auth|[_-]pat|[?&]sig|signature)s?["']?\]?\s*[=:]\s*"""
    rf"""[\[(]?\s*[bfru]?["']{{0,3}}({RANDOM})"""
    rf"""|--[\w-]*(?:key|token)["']?[=\s,]+["']?({RANDOM})|(?:bearer|basic)\s+({RANDOM})"""
    rf"""|(?:key|token)s?["'],\s*["']({RANDOM})"""
    rf"""|(?<!\w)((?:sk|nvapi|glpat|xox[a-z])-{RANDOM})"""
)
LIKELY_PLACES = re.compile(OTHER)
# Joined words with numbers, names of classes, digests, which are as random as a key, and dates.
PLAIN = re.compile(
    r"[A-Za-z]+\d*|(?:[A-Za-z]+\d{0,2}[A-Za-z]*\d*|\d*)(?:[_/.-]+(?:[A-Za-z]+\d{0,2}[A-Za-z]*\d*|\d+[A-Za-z]{0,3})?)+"
    r"|(?!(?:\D*\d){3})[\w.]*[A-Z][a-z]{6,}[\w.]*|[0-9a-fA-F]{32}|[0-9a-fA-F]{40}|[0-9a-fA-F]{56,}"
    r"|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|.*\d{4}-\d\d-\d\d.*"
)
PLACEHOLDER = re.compile(
    r"(?i:none|null|true|false|str(?:ing)?|required|optional|(?:my|insert|enter|replace|put|the|test)[ _-][a-z _-]*"
    r"|your.*|.*[-_ ]here|(?:sk-|hf_)?[x0]+|.*(?:\.\.\.|…|\*\*\*|xxxx).*|[.*]+|changeme|password|pass|redacted|hidden"
    r"|\S*\[redacted\].*|(?:env|vault|file|secrets?|enc)[:/.\[].*|os\.(?:environ|getenv).*"
    r"|[\w-]*[_-](?:key|token|password|secret)"
    r"|(?:example|sample|dummy).*)|(?i:bearer |basic |token )?[<\[{$%].*|[A-Z][A-Z_]*"
)
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
ENCODED = re.compile(r"(?<![\w+/-])[\w+/-]{24,}={0,2}")
BREAK = re.compile(r"""["']?[ \t]*[\\+,]?[ \t]*(?:\r?\n|\\n)[ \t]*["']?|["'][ \t]*\+?[ \t]*["']""")
BROKEN_TOKEN = re.compile(rf"""\b(?=(?:hf|api_org)_)\w*(?:{BREAK.pattern})\w+""")


def readings(text: str) -> Iterator[str]:
    """
    A text as it is; without escapes of characters, as in json that is a string in another, in addresses and in pages;
    and what it contains in base64.
    """
    yield text
    plain = re.sub(r"""\\+(["'/])""", r"\1", ESCAPED.sub(lambda found: chr(int(found[1] or found[2], 16)), text))
    plain = html.unescape(unquote(plain))
    if plain != text:
        yield plain
    yield "\n".join(filter(None, (_decode(found[0]) for found in ENCODED.finditer(plain))))


def _decode(encoded: str) -> str:
    """The text that base64 encodes; nothing for other words."""
    try:
        padded = encoded.rstrip("=").replace("+", "-").replace("/", "_") + "=="
        decoded = base64.urlsafe_b64decode(padded).decode("ascii")
    except ValueError:
        return ""
    return decoded if decoded.isprintable() else ""


def find_named_secret(name: str, text: str) -> str | None:
    """Names the kind of secret in a file of this name and text, without its value; `None` if there is none."""
    mended = (BREAK.sub("", broken[0]) for broken in BROKEN_TOKEN.finditer(text))
    # Words of two lines make up less.
    if any(TOKEN.match(whole) and len(whole) > 32 for whole in mended):
        return "a token"
    if name in VOCABULARIES:
        return None
    values = [value for place in PLACES for found in place.finditer(text) for value in found.groups() if value]
    likely = (value for found in LIKELY_PLACES.finditer(text) for value in found.groups() if value)
    values += [value for value in likely if not PLAIN.fullmatch(value)]
    return None if all(map(PLACEHOLDER.fullmatch, values)) else "a secret (a password or key)"
