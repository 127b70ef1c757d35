"""The files that GitHub, Read the Docs, conda and a release read: they agree with the package and with the Makefile."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from packaging.requirements import Requirement

import hf_liere
import training


if sys.version_info >= (3, 11):
    import tomllib
else:
    # pytest brings it along.
    import tomli as tomllib


MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Names of conda's packages.
CONDA = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
# Distributions whose modules have another name.
DISTRIBUTIONS = {"PIL": "pillow"}


def read(path: str | Path):
    return yaml.safe_load((ROOT / path).read_text())


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in [job, *job.get("steps", [])]]


def test_the_workflows_are_there():
    assert [path.stem for path in WORKFLOWS] == ["evidence", "nightly", "release", "tests", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile_alone(path):
    commands = [step["run"].split() for step in steps(read(path)) if "run" in step]
    assert commands or path.stem == "release"
    for make, target, *variables in commands:
        assert make == "make" and target in TARGETS
        assert all(re.fullmatch(r"[A-Z]+=[\w.]+", variable) for variable in variables)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_the_least_permissions(path):
    """Only the job that publishes may do more than read, and it runs no code of the repository."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    granted = {name: job for name, job in workflow["jobs"].items() if "permissions" in job}
    assert set(granted) == ({"publish"} if path.stem == "release" else set())
    for job in granted.values():
        assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
        assert job["environment"] == "release"
        assert not any("run" in step or step["uses"].startswith("actions/checkout") for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_and_end(path):
    for job in read(path)["jobs"].values():
        # A job that calls a workflow has the limits of that workflow.
        assert ("timeout-minutes" in job) != ("uses" in job)
    for action in (step["uses"] for step in steps(read(path)) if "uses" in step):
        if action.startswith("./"):
            assert "workflow_call" in read(action)[True], action  # YAML reads the key `on` as true
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", action), action


def test_the_citation_names_the_version_and_both_papers():
    """The fields that CFF 1.2.0 requires; papers as model cards cite them."""
    citation, papers = read("CITATION.cff"), read("model_cards/common.yaml")["papers"]
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"] and citation["authors"]
    assert citation["version"] == hf_liere.__version__ and citation["license"] == PYPROJECT["project"]["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PYPROJECT["project"]["authors"]
    ]
    for reference, name in zip(citation["references"], ("liere", "comrope"), strict=True):
        paper = papers[name]
        assert (reference["type"], reference["title"]) == ("conference-paper", paper["title"])
        authors = (f"{author['family-names']}, {author['given-names']}" for author in reference["authors"])
        (identifier,) = reference["identifiers"]
        assert f"author = {{{' and '.join(authors)}}}" in paper["bibtex"]
        assert f"year = {{{reference['year']}}}" in paper["bibtex"]
        assert f"eprint = {{{identifier['value'].removeprefix('arXiv:')}}}" in paper["bibtex"]
        assert f"booktitle = {{{reference['conference']['name']}}}" in paper["bibtex"]
        assert reference["url"] == paper["url"]


def test_every_folder_of_the_package_is_in_the_wheel():
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "hf_liere").rglob("__init__.py")}
    # Outside of the package in a wheel, so that the command starts without importing it.
    folders -= {Path("hf_liere/launcher")}
    assert {".".join(folder.parts) for folder in folders} < set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_the_conda_recipe_requires_what_the_package_requires():
    recipe, project = read(".conda/recipe.yaml"), PYPROJECT["project"]
    assert recipe["context"]["version"] == hf_liere.__version__ and recipe["package"]["name"] == project["name"]
    needed = [Requirement(text) for text in project["dependencies"]]
    named = {f"{CONDA.get(one.name, one.name)} {one.specifier}" for one in needed}
    assert set(recipe["requirements"]["run"]) == named | {f"python {project['requires-python']}"}
    host = {name.replace(" ", "") for name in recipe["requirements"]["host"]}
    assert host == {"python", "pip", *PYPROJECT["build-system"]["requires"]}
    assert recipe["about"]["license"] == project["license"] and recipe["about"]["summary"] == project["description"]
    assert (ROOT / recipe["about"]["license_file"]).is_file()


def test_read_the_docs_builds_the_site_of_make_docs():
    settings = read(".readthedocs.yaml")
    assert settings["version"] == 2
    (installation,) = settings["python"]["install"]
    assert installation == {"method": "pip", "path": ".", "extra_requirements": ["docs"]}
    folder = Path(settings["sphinx"]["configuration"]).parent
    assert f"--fail-on-warning --keep-going {folder} " in MAKEFILE
    assert settings["sphinx"]["fail_on_warning"] and (folder / "conf.py") == Path("docs/conf.py")


def test_bug_reports_contain_the_environment():
    templates = {path.stem: read(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert set(templates) == {"config", "bug_report", "feature_request"}
    assert templates["config"] == {"blank_issues_enabled": False}
    required = [part for part in templates["bug_report"]["body"] if part.get("validations") == {"required": True}]
    assert required[0]["attributes"]["label"] == "Output of `hf-liere env`"


@pytest.fixture
def release(tmp_path):
    """A copy of what a release reads, and the check of it."""
    for name in ("hf_liere/version.py", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    specification = importlib.util.spec_from_file_location("check_release", ROOT / ".ci" / "check_release.py")
    check = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(check)
    return tmp_path, check.missing


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


def test_a_release_needs_its_tag_its_date_and_the_repository(release):
    root, missing = release
    version = hf_liere.__version__
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version} (unreleased)\n")
    sentences = missing(root, "v9.9")
    assert len(sentences) == 3 and sentences[0].startswith(f"TAG is 'v9.9'; accepted: 'v{version}'")
    assert sentences[1].startswith("CHANGELOG.md has no heading") and "Repository" in sentences[2]

    edit(root / "pyproject.toml", r"^# (Repository = .*)OWNER", r"\1someone")
    edit(root / "CHANGELOG.md", r"\(unreleased\)$", "(2026-01-31)")
    (sentence,) = missing(root, f"v{version}")
    assert sentence == "date-released of CITATION.cff is None; accepted: 2026-01-31, the date in CHANGELOG.md."
    edit(root / "CITATION.cff", r"^version: .*", r"\g<0>\ndate-released: 2026-01-31")
    assert missing(root, f"v{version}") == []


@pytest.mark.parametrize("extra", training.LIBRARIES)
def test_the_extra_that_scripts_name_has_the_library(extra):
    provided = {Requirement(text).name for text in PYPROJECT["project"]["optional-dependencies"][extra]}
    assert {DISTRIBUTIONS.get(name, name) for name in training.LIBRARIES[extra]} <= provided
