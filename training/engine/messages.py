"""Parts of sentences that several messages have in common."""

from collections.abc import Sequence


def reason(error: BaseException) -> str:
    """What an error of another library says: its class and the first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def listed(names: Sequence[str]) -> str:
    """The first ten names, and how many there are if that is not all."""
    return ", ".join(names[:10]) + (f" … ({len(names)})" if len(names) > 10 else "")
