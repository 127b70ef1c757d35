"""What `from_pretrained` goes on without: weights that a checkpoint lacks, or that the model has no place for."""

from collections.abc import Iterable

from training.arguments import InputError


def require_loaded_keys(loading: dict, checkpoint: str, besides: tuple[str, ...] = ()) -> None:
    """
    Args:
        loading: what `from_pretrained` says about its keys.
        besides: prefixes of keys that may be missing or left over.

    Raises:
        InputError: naming the keys that are missing, of another shape or left over.
    """
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in loading["mismatched_keys"]}
    missing, unexpected = set(loading["missing_keys"]) | mismatched, loading["unexpected_keys"]
    missing, unexpected = ({key for key in keys if not key.startswith(besides)} for keys in (missing, unexpected))
    require_all_keys(missing, unexpected, checkpoint)


def require_all_keys(missing: Iterable[str], unexpected: Iterable[str], checkpoint: str) -> None:
    if missing or unexpected:
        raise InputError(
            f"The checkpoint {checkpoint} does not fit the model. Missing: {', '.join(sorted(missing)) or 'none'}. "
            f"Unexpected: {', '.join(sorted(unexpected)) or 'none'}."
        )
