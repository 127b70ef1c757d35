"""What the tests of publishing push: saved models of every kind, and a small folder as it is published."""

import pytest
from published_models import CARD, save_models

from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.staging import stage


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def ready(saved, tmp_path):
    """A small folder as it is published, for tests of what happens on the way."""
    folder = tmp_path / "ready"
    stage(SavedModel(saved["image"]), folder)
    (folder / "README.md").write_text(CARD)
    return folder
