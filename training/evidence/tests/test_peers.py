"""Models of other projects that learn from the batches of ours: e3nn's network, and invariant point attention."""

import sys

import pytest
import torch
import yaml
from checkout import ROOT
from scipy.spatial.transform import Rotation
from structures import RESIDUES, SMALL, write_chains
from transformers import PreTrainedConfig

from hf_liere.errors import InputError
from training.evidence import e3nn_peer, evaluate_sweep, ipa_peer
from training.evidence.data import proteins
from training.evidence.reporting.result_lines import read_results


def test_a_sweep_misses_packages_before_it_trains(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "e3nn", None)
    sweep = str(ROOT / "training" / "evidence" / "sweeps" / "proteins.yaml")
    with pytest.raises(InputError, match="script=evidence.e3nn_peer.* needs e3nn; accepted: pip install e3nn"):
        evaluate_sweep.main([sweep, "--mini", "--structures", str(tmp_path), "--output_dir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


def test_the_peer_of_e3nn_sees_relative_poses_alone(tmp_path):
    """And it is a model of sweeps."""
    pytest.importorskip("e3nn", reason="e3nn is not installed")
    write_chains(tmp_path / "chains")
    axes = [[{"seed": 0}], [{"block_size": 3}, {"script": "evidence.e3nn_peer", "channels": 4, "max_radius": 2.0}]]
    sweep = {"script": "token_classification", "recipe": "proteins_mini", "train": axes}
    (tmp_path / "peer.yaml").write_text(yaml.safe_dump(sweep))
    given = ["--structures", str(tmp_path / "chains"), *SMALL, "--output_dir", str(tmp_path / "runs")]
    results = read_results(evaluate_sweep.main([str(tmp_path / "peer.yaml"), *given]))
    assert [line["script"] for line in results] == ["token_classification", "evidence.e3nn_peer"]
    assert {line["metrics"]["eval_samples"] for line in results} == {RESIDUES}
    # Finished runs are not repeated.
    assert read_results(evaluate_sweep.main([str(tmp_path / "peer.yaml"), *given])) == results
    columns = [proteins.protein_columns(str(tmp_path / "chains"), "validation", 6, angle) for angle in (0, 180)]
    features = torch.tensor(columns[0]["features"]).double()
    torch.manual_seed(0)
    size = {"feature_size": 2, "tokens": 12, "num_labels": 3}
    config = PreTrainedConfig(**size, **vars(e3nn_peer.PeerArguments(channels=4, max_radius=2.0)))
    model = e3nn_peer.EquivariantNetwork(config).double()
    poses = [torch.tensor(one["poses"]).double().unflatten(-1, (4, 4)) for one in columns]
    poses[1][..., :3, 3] += torch.tensor([1.0, -2.0, 3.0])
    before, after = (model(features, placed)["logits"] for placed in poses)
    assert before.shape == (6, 3) and before.std() > 1e-2
    # Poses are rounded to float32.
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_invariant_points_attend_as_in_alphafold(tmp_path):
    """Against Algorithm 22 in loops, without pairs; and its model of a sweep sees relative poses alone."""
    size = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    config = PreTrainedConfig(**size, feature_size=2, num_labels=3, query_points=2, value_points=3)
    torch.manual_seed(0)
    attention = ipa_peer.InvariantPointAttention(config).double()
    states, places = torch.randn(1, 4, 8).double(), torch.randn(4, 3).double()
    turns = torch.tensor(Rotation.random(4, random_state=0).as_matrix())
    scalars = attention.scalars(states)[0].view(4, 3, 2, 4)  # token, which, head, channel
    points = attention.points(states)[0].view(4, 2, 7, 3)  # token, head, point, axis
    heads = [[], []]
    for head in range(2):
        factor = torch.log1p(attention.weight[head].exp()) / 2 * (2 / (9 * 2)) ** 0.5
        in_world = [turns[token] @ points[token, head].mT + places[token][:, None] for token in range(4)]
        for i in range(4):
            scores = [
                scalars[i, 0, head] @ scalars[j, 1, head] / 4**0.5
                - factor * (in_world[i][:, :2] - in_world[j][:, 2:4]).square().sum()
                for j in range(4)
            ]
            shares = (torch.stack(scores) / 2**0.5).softmax(0)
            value = sum(share * scalars[j, 2, head] for j, share in enumerate(shares))
            seen = sum(share * in_world[j][:, 4:] for j, share in enumerate(shares))
            local = (turns[i].mT @ (seen - places[i][:, None])).mT  # (3, 3), point, axis
            heads[head].append((value, local, local.norm(dim=-1)))
    made = [torch.cat([heads[head][i][part].flatten() for part in range(3) for head in range(2)]) for i in range(4)]
    wanted = attention.output(torch.stack(made))
    torch.testing.assert_close(attention(states, turns[None], places[None])[0], wanted, atol=1e-7, rtol=0)

    write_chains(tmp_path / "chains")
    recipe = str(ROOT / "training" / "evidence" / "recipes" / "proteins_mini.yaml")
    given = ["--structures", str(tmp_path / "chains"), "--ask", "rotamer", *SMALL]
    turned, as_filed = (
        ipa_peer.main([recipe, *given, "--evaluation_angle", angle, "--output_dir", str(tmp_path / angle)])["eval_loss"]
        for angle in ("180", "0")
    )
    assert turned == pytest.approx(as_filed, abs=1e-5)
