"""Texts for others: reports, and errors in records."""

import getpass
import os
import re
import socket


def describe_error(error: Exception) -> str:
    return remove_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]


def remove_secrets(text: str) -> str:
    """Removes tokens and the names of user and host, and replaces the home directory by ~."""
    for name, value in os.environ.items():
        if re.search("TOKEN|KEY|SECRET|PASSWORD", name, re.I) and len(value) >= 8:
            text = text.replace(value, "…")
    text = re.sub(r"\bhf_[A-Za-z0-9]{16,}", "…", text)
    home = os.path.expanduser("~")
    for path in {home, os.path.realpath(home)} - {"/"}:
        text = re.sub(re.escape(path) + r"(?![\w.-])", "~", text)
    if len(host := socket.gethostname()) > 3:
        text = re.sub(rf"\b{re.escape(host)}\b", "host", text)
    # User names may be ordinary words: replace them only in paths and addresses.
    return re.sub(rf"(?<=/){re.escape(_user())}(?=[/\s'\"]|$)|\b{re.escape(_user())}(?=@)", "user", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # Users in containers may have no name.
        return "user"
