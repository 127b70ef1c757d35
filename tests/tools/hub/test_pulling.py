"""Pulling from a local Hub: revisions, tokens, damage on the way, and no Hub at all."""

import pytest
from hub_client import OTHER, READ, WRITE, client
from huggingface_hub import HfApi, constants

from hf_liere.auto import load_checkpoint
from hf_liere.errors import InputError
from hf_liere.storage.client import HubError, UnreachableError
from hf_liere.tools.hub.publishing import publish
from hf_liere.tools.hub.pulling import pull


WEIGHTS = bytes(range(256)) * 400


@pytest.fixture
def published(hub, tmp_path):
    """Two commits, of which the first is tagged and the second has a branch; contents of the weights by commit."""
    commits = []
    for version in (b"first", b"second"):
        folder = tmp_path / version.decode()
        (folder / "last-checkpoint").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(WEIGHTS + version)
        (folder / "config.json").write_text("{}")
        (folder / "last-checkpoint" / "optimizer.pt").write_bytes(b"state")
        commits.append(publish(folder, "tester/model", message=version.decode(), api=client(hub)).commit)
        if version == b"first":
            client(hub).create_tag("tester/model", tag="v1")
    client(hub).create_branch("tester/model", branch="next")
    hub.reset()
    return commits


def test_revisions(hub, published, storage, tmp_path):
    first, second = published
    for revision, commit in (("main", second), ("v1", first), ("next", second), (first, first), (second[:8], second)):
        pulled = pull("tester/model", tmp_path / f"at {revision}", revision=revision, api=client(hub))
        assert pulled.commit == commit
        expected = WEIGHTS + (b"first" if commit == first else b"second")
        assert (pulled.folder / "model.safetensors").read_bytes() == expected
        # What training goes on from is nothing to load a model with.
        assert {path.name for path in pulled.folder.iterdir()} == {"model.safetensors", "config.json", ".gitattributes"}
    states = pull("tester/model", tmp_path / "states", path="last-checkpoint", api=client(hub))
    assert [path.name for path in states.folder.iterdir()] == ["optimizer.pt"]
    with pytest.raises(HubError, match="has no revision 'v2'; accepted are main, next, v1 and commits"):
        pull("tester/model", revision="v2", api=client(hub))
    with pytest.raises(HubError, match="has no folder 'absent'"):
        pull("tester/model", path="absent", api=client(hub))
    with pytest.raises(FileExistsError, match="not an empty directory"):
        pull("tester/model", tmp_path / "states", api=client(hub))
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file/inside cannot be written: "):
        pull("tester/model", tmp_path / "file" / "inside", api=client(hub))


ELSEWHERE = ["/etc", "..", "../..", "a/../../b", "..\\a", "C:/a", "C:a", "\\\\host\\share", ".", ""]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_name_leads_out_of_the_repository(hub, published, tmp_path, name):
    """On any system: the name of a folder, of a revision, and of a file that the Hub lists."""
    for option in ("path", "revision"):
        with pytest.raises(HubError, match=rf"{option}='.*' leads out of the repository"):
            pull("tester/model", tmp_path / option, api=client(hub), **{option: name})
        assert not (tmp_path / option).exists()
    with pytest.raises(HubError, match="leads out of the repository"):
        load_checkpoint("tester/model", revision=name)
    if name in (".", ""):
        return
    repository = hub.repo("tester/model")
    parent, tree = repository.tree("main")
    repository.commit("main", tree | {f"{name}/file": tree["config.json"]}, "x", "", "tester", parent)
    with pytest.raises(HubError, match="lists a file that would be written elsewhere: .* leads out"):
        pull("tester/model", tmp_path / "listed", api=client(hub))
    assert not (tmp_path / "listed").exists()


def test_folders_with_unusual_names_are_pulled(hub, tmp_path):
    """A pattern of the client would take brackets for a choice of letters."""
    (tmp_path / "model" / "step [1]").mkdir(parents=True)
    (tmp_path / "model" / "step 1").mkdir()
    for folder in ("step [1]", "step 1"):
        (tmp_path / "model" / folder / "config.json").write_text(f'{{"{folder}": 0}}')
    publish(tmp_path / "model", "tester/steps", message="x", api=client(hub))
    for path in ("step [1]", "step [1]/", "./step [1]"):
        folder = pull("tester/steps", tmp_path / "pulled" / str(len(path)), path=path, api=client(hub)).folder
        assert {file.name: file.read_text() for file in folder.iterdir()} == {"config.json": '{"step [1]": 0}'}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_in_the_cache_are_not_followed(hub, published, tmp_path, kind):
    """Offline, where only the names of links tell the hashes of files."""
    cached = pull("tester/model", path="last-checkpoint", api=client(hub)).folder
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "optimizer.pt").write_text("secret")
    if kind == "file":
        (cached / "key").symlink_to(tmp_path / "private" / "optimizer.pt")
    else:
        (cached / "optimizer.pt").unlink()
        cached.rmdir()
        cached.symlink_to(tmp_path / "private")
    down = HfApi(endpoint="http://127.0.0.1:9", token=WRITE)
    with pytest.raises((HubError, ValueError), match="link out of its folder|has no folder"):
        pull("tester/model", tmp_path / "pulled", path="last-checkpoint", api=down)
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize(
    "token, message",
    [
        (False, "private and no token is given: run `hf auth login`, or set HF_TOKEN"),
        (OTHER, "private and the token in use may not see it"),
        ("hf_nobodys", "does not accept the token in use"),
    ],
)
def test_a_private_repository(hub, published, token, message):
    client(hub).update_repo_settings("tester/model", private=True)
    with pytest.raises(HubError, match=message) as caught:
        pull("tester/model", api=client(hub, token))
    assert str(token) not in str(caught.value)
    # The chain of an error is printed too, and would show the request.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert pull("tester/model", api=client(hub, READ)).commit == published[-1]


def test_a_gated_repository(hub, published):
    client(hub).update_repo_settings("tester/model", gated="manual")
    with pytest.raises(HubError, match="is gated and access was not granted: run `hf auth login`"):
        pull("tester/model", api=client(hub, False))
    with pytest.raises(HubError, match="is gated and access was not granted: ask for access on its page"):
        pull("tester/model", api=client(hub, OTHER))
    assert pull("tester/model", api=client(hub, WRITE)).commit == published[-1]


def test_a_repository_that_does_not_exist(hub):
    with pytest.raises(HubError, match="There is no tester/absent on http://127.0.0.1"):
        pull("tester/absent", api=client(hub))
    with pytest.raises(HubError, match="tester/a/b"):
        pull("tester/a/b", api=client(hub))


CONTENT = "GET /_cdn/"


@pytest.mark.parametrize("fault", [{"corrupt": 5000}, {"truncate": 50_000}, {"drop": 50_000}, {"rst": 50_000}])
def test_damage_on_the_way_is_repaired(hub, published, tmp_path, fault):
    hub.fail(CONTENT, **fault)
    pulled = pull("tester/model", tmp_path / "pulled", api=client(hub))
    assert (pulled.folder / "model.safetensors").read_bytes() == WEIGHTS + b"second"
    assert hub.faults[0].hits == 1


def test_damage_that_stays_is_reported_and_not_kept(hub, published, tmp_path):
    hub.fail(CONTENT, corrupt=5000, times=-1)
    with pytest.raises(HubError, match="model.safetensors of tester/model .* arrived twice with another content"):
        pull("tester/model", tmp_path / "pulled", api=client(hub))
    assert not (tmp_path / "pulled").exists()
    hub.reset()
    pulled = pull("tester/model", tmp_path / "pulled", api=client(hub))
    assert (pulled.folder / "model.safetensors").read_bytes() == WEIGHTS + b"second"


def test_a_small_file_is_compared_too(hub, published):
    """Files that are not in LFS have another hash, SHA-1 of a git blob."""
    hub.fail("GET .*/resolve/.*/config.json", corrupt=0, times=-1)
    with pytest.raises(HubError, match="config.json of tester/model"):
        pull("tester/model", api=client(hub))


def test_other_bytes_of_the_right_length_in_the_store(hub, published, tmp_path):
    """Someone exchanged the weights behind the Hub's back."""
    entry = hub.files("tester/model")["model.safetensors"]
    hub.store.blobs[entry["sha"]] = WEIGHTS + b"others"
    with pytest.raises(HubError, match="arrived twice with another content"):
        pull("tester/model", tmp_path / "pulled", api=client(hub))


@pytest.mark.parametrize("status", [429, 503])
def test_overload_is_waited_for(hub, published, status):
    hub.fail("GET /api/models/", status=status, headers={"Retry-After": "0"})
    assert pull("tester/model", api=client(hub)).commit == published[-1]


def test_an_endpoint_that_is_down(hub, published, tmp_path, storage):
    """With a warm cache the pull goes on, and says where it comes from; with a cold one it says what is missing."""
    warm = pull("tester/model", api=client(hub))
    # Nothing listens on the discard port.
    down = HfApi(endpoint="http://127.0.0.1:9", token=WRITE)
    assert pull("tester/model", tmp_path / "pulled", api=down).commit == warm.commit
    assert (tmp_path / "pulled" / "model.safetensors").read_bytes() == WEIGHTS + b"second"
    with pytest.raises(UnreachableError, match="did not answer .* not completely\\) in the local cache"):
        pull("tester/model", api=down, cache_dir=tmp_path / "cold")
    (warm.folder / "model.safetensors").resolve().write_bytes(WEIGHTS + b"damage")
    with pytest.raises(HubError, match="model.safetensors of tester/model in the local cache is damaged"):
        pull("tester/model", api=down)


def test_offline(hub, published, monkeypatch, tmp_path):
    warm = pull("tester/model", api=client(hub), revision="v1")
    hub.reset()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull("tester/model", api=client(hub), revision="v1").commit == warm.commit
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        pull("tester/model", api=client(hub), cache_dir=tmp_path / "cold")
    assert not hub.requests
