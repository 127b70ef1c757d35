"""Pushes over a bad connection, to a Hub that is down, and beside pushes of others."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_client import WAITS, client, history, start
from published_models import CARD
from safetensors.torch import load_file

from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.cards import Card
from hf_liere.tools.hub.publishing import ConcurrentCommitError, publish, push
from hf_liere.tools.hub.pulling import pull


COMMIT = "POST .*/commit/"


@pytest.mark.parametrize(
    "fault, attempts",
    [
        ({"lost": True}, 1),
        ({"status": 503, "times": 2}, 3),
        ({"close": True}, 2),
        ({"status": 429, "headers": {"Retry-After": "2"}}, 2),
        pytest.param({"status": 429, "headers": {"RateLimit": '"api";r=0;t=2'}}, 2, marks=pytest.mark.slow),
    ],
    ids=["lost response", "5xx", "closed", "Retry-After", "RateLimit"],
)
def test_a_commit_happens_once_whatever_its_answer(ready, hub, storage, fault, attempts):
    hub.fail(COMMIT, **fault)
    published = publish(ready, "tester/model", message="Once", api=client(hub))
    assert history(hub) == ["Once"] and hub.repo("tester/model").resolve("main") == published.commit
    sent = hub.lines(COMMIT)
    assert len(sent) == attempts
    if "headers" in fault:
        # The header asks for two seconds.
        assert sent[1]["t"] - sent[0]["t"] >= 2 * WAITS


@pytest.mark.parametrize(
    "path", ["validate-yaml", "preupload", "whoami", "repos/create", "api/models/tester/model", "batch"]
)
def test_faults_of_any_request_are_survived(ready, hub, path):
    hub.fail(path, status=502, headers={"Retry-After": "0"})
    hub.fail(path, close=True)
    publish(ready, "tester/model", message="Once", api=client(hub))
    assert history(hub) == ["Once"] and all(fault.hits for fault in hub.faults)


def test_a_push_that_failed_is_reported_and_the_next_one_completes_it(ready, hub, tmp_path):
    hub.fail(COMMIT, status=500, times=-1, headers={"Retry-After": "0"})
    with pytest.raises(HubError, match="refused the request after 5 attempts"):
        publish(ready, "tester/model", message="Never", api=client(hub))
    assert history(hub) == [] and hub.count(COMMIT) == 5
    hub.reset()
    publish(ready, "tester/model", message="Once", api=client(hub))
    pulled = pull("tester/model", tmp_path / "pulled", api=client(hub))
    files = {path.name: path.read_bytes() for path in ready.iterdir()}
    assert history(hub) == ["Once"] and {name: (pulled.folder / name).read_bytes() for name in files} == files


def test_a_file_that_changes_while_it_is_sent_is_reported(ready, hub, monkeypatch):
    api = client(hub)
    commit = api.create_commit

    def commit_and_change(*args, **options):
        made = commit(*args, **options)
        (ready / "config.json").write_bytes((ready / "config.json").read_bytes() + b" ")
        return made

    monkeypatch.setattr(api, "create_commit", commit_and_change)
    with pytest.raises(HubError, match="differs from the push: config.json. Push again"):
        publish(ready, "tester/model", message="Once", api=api)


def test_too_long_a_wait_is_not_waited(ready, hub):
    hub.fail(COMMIT, status=429, times=-1, headers={"Retry-After": "7200"})
    with pytest.raises(HubError, match="tester/model"):
        publish(ready, "tester/model", message="Never", api=client(hub))


def test_a_commit_of_someone_else_in_between_is_reported(ready, hub, tmp_path):
    first = publish(ready, "tester/model", message="First", api=client(hub))
    other = tmp_path / "other"
    shutil.copytree(ready, other)
    (other / "LICENSE").write_text("terms")
    (ready / "README.md").write_text(CARD + "\nChanged.\n")
    hub.fail(COMMIT, delay=2, times=1)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(publish, ready, "tester/model", message="Slow", api=client(hub))
        while not hub.faults[0].hits:
            pass
        publish(other, "tester/model", message="In between", api=client(hub))
    assert history(hub) == ["First", "In between"]
    with pytest.raises(ConcurrentCommitError, match="'In between' by tester.*Nothing was written"):
        slow.result()
    with pytest.raises(ConcurrentCommitError, match="has moved on from commit"):
        publish(ready, "tester/model", message="Slow", parent_commit=first.commit, api=client(hub))


def test_a_lost_response_and_someone_else_right_after(ready, hub, tmp_path):
    """Our commit is in the history, though no longer the newest: it did happen."""
    hub.fail(COMMIT, lost=True)
    hub.fail("/commits/main", delay=2)
    other = tmp_path / "other"
    other.mkdir()
    (other / "LICENSE").write_text("terms")
    with ThreadPoolExecutor() as threads:
        ours = threads.submit(publish, ready, "tester/model", message="Ours", api=client(hub))
        while not history(hub):
            pass
        publish(other, "tester/model", message="Theirs", api=client(hub))
    assert history(hub) == ["Ours", "Theirs"]
    assert ours.result().commit != hub.repo("tester/model").resolve("main")


SAVE_AGAIN_AND_AGAIN = """
import itertools, os, sys, time
from safetensors.torch import load_file, save_file
path = sys.argv[1]
tensors = load_file(path)
for step in itertools.count():
    save_file({name: tensor * 0 + step for name, tensor in tensors.items()}, path + ".new", {"format": "pt"})
    os.replace(path + ".new", path)
    time.sleep(1)
"""


@pytest.mark.slow
def test_a_push_while_a_training_run_saves(saved, hub, tmp_path):
    """What arrives is one of the saved models, with its card, or nothing."""
    folder, arrived = tmp_path / "run", []
    shutil.copytree(saved["image"], folder)
    before = SavedModel(folder).digest
    run = start(["-c", SAVE_AGAIN_AND_AGAIN, str(folder / "model.safetensors")], hub, tmp_path)
    try:
        while SavedModel(folder).digest == before:
            assert run.poll() is None, run.communicate()
        for _ in range(4):
            known = SavedModel(folder)
            try:
                card = Card(f"Weights: SHA-256 `{known.digest}`")
                commit = push(known, "tester/model", card=card, reload=False, api=client(hub)).commit
                arrived.append((known.digest, commit))
            except ValueError as error:
                assert "has changed since it was first read" in str(error)
    finally:
        run.kill()
        run.communicate()
    # A model that was pushed twice is one commit.
    assert len(history(hub) or []) == len({commit for _, commit in arrived})
    for digest, commit in arrived:
        pulled = pull("tester/model", revision=commit, api=client(hub)).folder
        values = {float(tensor.flatten()[0]) for tensor in load_file(pulled / "model.safetensors").values()}
        assert SavedModel(pulled).digest == digest and len(values) == 1
        assert digest in (pulled / "README.md").read_text()
    card = Card(f"Weights: SHA-256 `{SavedModel(folder).digest}`")
    assert push(folder, "tester/model", card=card, reload=False, api=client(hub)).commit


@pytest.mark.slow
def test_two_processes_at_once(saved, hub, tmp_path):
    """Both have seen the same commit when they commit: one wins, the other says so, nothing is mixed."""
    hub.fail("/preupload/", delay=3, times=2)
    homes = [tmp_path / name for name in ("first", "second")]
    client(hub).create_repo("tester/model")
    processes = []
    for home, kind in zip(homes, ("image", "backbone")):
        home.mkdir()
        command = f"-m hf_liere.tools.cli push {saved[kind]} tester/model --no_reload --message {kind}"
        processes.append(start(command.split(), hub, home))
    results = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert sorted(code for *_, code in results) == [0, 1], results
    winner = ("image", "backbone")[[code for *_, code in results].index(0)]
    loser = next(errors for _, errors, code in results if code)
    assert "has moved on from commit" in loser and "Traceback" not in loser and history(hub) == [winner]
    assert SavedModel(pull("tester/model", api=client(hub)).folder).digest == SavedModel(saved[winner]).digest
