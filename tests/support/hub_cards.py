"""What the local Hub checks in the metadata of a model card: a subset of what huggingface.co checks."""

import re
from collections.abc import Iterator

import yaml


KNOWN_LICENSES = set(
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd "
    "bsd-2-clause bsd-3-clause cc cc0-1.0 cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 ecl-2.0 epl-1.0 "
    "epl-2.0 gpl gpl-2.0 gpl-3.0 agpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc mpl-2.0 ms-pl ncsa odbl ofl-1.1 pddl "
    "postgresql unlicense wtfpl zlib llama2 llama3 llama3.1 llama3.2 llama3.3 gemma other unknown".split()
)


def front_matter(text: str) -> str | None:
    found = re.match(r"^\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.S)
    return found and found[1]


def read_metadata(text: str) -> dict:
    """The metadata of a card, empty where it has none that can be read."""
    try:
        metadata = yaml.safe_load(front_matter(text) or "")
    except yaml.YAMLError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def validate_card(content: str) -> tuple[list[str], list[str]]:
    """Errors and warnings."""
    try:
        metadata = yaml.safe_load(front_matter(content) or "")
    except yaml.YAMLError as error:
        return [f"Invalid YAML: {str(error).splitlines()[0]}"], []
    if metadata is None:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(metadata, dict):
        return ["metadata must be a mapping"], []
    return [*find_field_errors(metadata), *find_index_errors(metadata.get("model-index", []))], []


def find_field_errors(metadata: dict) -> Iterator[str]:
    license = metadata.get("license")
    for name in license if isinstance(license, list) else [license]:
        if name is not None and name not in KNOWN_LICENSES:
            yield f'"license" must be one of [{", ".join(sorted(KNOWN_LICENSES)[:6])}, ...]'
    for field in ("tags", "datasets", "metrics", "language"):
        values = metadata.get(field, [])
        if isinstance(values, str) and field != "tags":
            continue
        if not isinstance(values, list):
            yield f'"{field}" must be an array'
        elif not all(isinstance(value, str) for value in values):
            yield f'"{field}" must be an array of strings'
    for field in ("pipeline_tag", "library_name"):
        if not isinstance(metadata.get(field, ""), str):
            yield f'"{field}" must be a string'


def find_index_errors(index) -> Iterator[str]:
    if not isinstance(index, list):
        yield '"model-index" must be an array'
        return
    for number, model in enumerate(index):
        place = f"model-index[{number}]"
        if not isinstance(model, dict) or not model.get("name"):
            yield f'"{place}.name" is required'
        elif not isinstance(model.get("results"), list):
            yield f'"{place}.results" is required'
        else:
            for result_number, result in enumerate(model["results"]):
                yield from find_result_errors(result, f"{place}.results[{result_number}]")


def find_result_errors(result: dict, place: str) -> Iterator[str]:
    if not (result.get("task") or {}).get("type"):
        yield f'"{place}.task.type" is required'
    for field in ("name", "type"):
        if "dataset" in result and not (result["dataset"] or {}).get(field):
            yield f'"{place}.dataset.{field}" is required'
    if not isinstance(result.get("metrics"), list):
        yield f'"{place}.metrics" is required'
        return
    for number, metric in enumerate(result["metrics"]):
        for field in ("type", "value"):
            if metric.get(field) in (None, ""):
                yield f'"{place}.metrics[{number}].{field}" is required'
