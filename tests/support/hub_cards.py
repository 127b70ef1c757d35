"""What the local Hub checks in the metadata of a model card: a subset of what huggingface.co checks."""

from huggingface_hub import ModelCard


KNOWN_LICENSES = set(
    "apache-2.0 mit openrail afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause cc cc0-1.0 cc-by-2.0 cc-by-3.0 "
    "cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-4.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 ecl-2.0 epl-1.0 epl-2.0 gpl gpl-2.0 gpl-3.0 agpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc "
    "mpl-2.0 ms-pl ncsa odbl ofl-1.1 pddl postgresql unlicense wtfpl zlib llama2 llama3 gemma other unknown".split()
)


def validate_card(content: str) -> list[str]:
    """Errors; the client knows which parts of results are needed."""
    try:
        metadata = ModelCard(content).data.to_dict()
    except Exception as error:
        return [str(error).splitlines()[0]]

    def strings(field: str) -> list:
        value = metadata.get(field) or []
        return value if isinstance(value, list) else [value]

    unknown = set(strings("license")) - KNOWN_LICENSES
    errors = [f'"license" must be one of [{", ".join(sorted(KNOWN_LICENSES)[:6])}, ...]' for _ in unknown]
    for field in ("tags", "datasets", "metrics", "language", "pipeline_tag", "library_name"):
        if not all(isinstance(value, str) for value in strings(field)):
            errors += [f'"{field}" must be a string or an array of strings']
    return errors
