"""A few steps of training lower the loss, and what they export loads with plain transformers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sightlens.model import HookedVLM
from sightlens.zoo import progress
from sightlens.zoo.evaluate import FOLDERS
from sightlens.zoo.losses import around, target_table
from sightlens.zoo.network import make_network
from sightlens.zoo.optim import Muon, orthogonalize
from sightlens.zoo.recipe import RECIPES, Recipe, Sizes
from sightlens.zoo.train import train
from sightlens.zoo.trainer import Plan, Trainer, rate


def small(name: str) -> Recipe:
    recipe = RECIPES[name]
    sizes: Sizes = dataclasses.replace(recipe.sizes, tower_width=32, tower_layers=3, width=32, layers=4)
    return dataclasses.replace(recipe, sizes=sizes, schedule=dataclasses.replace(recipe.schedule, batch=3, tower_only=0.0))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_training_exports_a_loadable_folder(name: str, tmp_path: Path) -> None:
    run = train(Plan(small(name), tmp_path, minutes=1.0, steps=3))
    assert run.step == 3
    loaded = HookedVLM.from_pretrained(tmp_path).hf
    assert type(loaded).__name__ == type(run.network).__name__
    for file in ("sightlens.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        shipped = json.loads((FOLDERS[name] / file).read_text())
        assert json.loads((tmp_path / file).read_text()) == shipped
    for file in ("chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / file).read_text() == (FOLDERS[name] / file).read_text()
    weights = run.network.state_dict()
    assert loaded.dtype == torch.float32
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, weights[key].half().float())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_loss_falls(name: str, tmp_path: Path) -> None:
    trainer = Trainer(Plan(small(name), tmp_path, minutes=1.0, steps=30))
    losses = [trainer.advance() for _ in range(30)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    plan = Plan(small("llava"), tmp_path, minutes=1.0, steps=6)
    whole, first, second = Trainer(plan), Trainer(plan), Trainer(plan)
    for _ in range(6):
        whole.advance()
    for _ in range(3):
        first.advance()
    progress.save(first)
    progress.restore(second)
    for _ in range(3):
        second.advance()
    for name, value in whole.network.state_dict().items():
        torch.testing.assert_close(second.network.state_dict()[name], value)


def test_muon_steps_are_orthogonal() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(2, 12, 30)))
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    weight = nn.Parameter(torch.zeros(5, 5))
    weight.grad = torch.randn(5, 5)
    Muon([weight], lr=0.1).step()
    assert (weight * weight.grad).sum() < 0


def test_the_rate_rises_and_falls() -> None:
    schedule = RECIPES["llava"].schedule
    assert rate(schedule, 0.0) < rate(schedule, schedule.warmup) == 1.0
    assert rate(schedule, 0.99) < rate(schedule, 0.7) < 1.0


def test_blurred_targets_peak_at_the_truth() -> None:
    bell = around(torch.tensor([0.5, 0.25]), 1.0)
    assert bell.argmax(-1).tolist() == [32, 16]
    torch.testing.assert_close(bell.sum(-1), torch.ones(2))
    trainer_tokens = Trainer(Plan(small("llava"), Path(), 1.0, steps=1)).batcher.tokenizer
    table = target_table(trainer_tokens, 1.0)
    assert table.argmax(-1).tolist() == list(range(len(trainer_tokens)))
    yes = trainer_tokens.convert_tokens_to_ids("yes")
    assert table[yes, yes] == 1.0


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_first_tower_layer_starts_by_looking_at_neighbours(name: str) -> None:
    network = make_network(RECIPES[name], seed=0)
    network.set_attn_implementation("eager")
    side = RECIPES[name].sizes.view
    pattern = network.model.vision_tower(torch.zeros(1, 3, side, side), output_attentions=True).attentions[0][0]
    middle = 1 + 3 * 8 + 3
    looked = [divmod(int(row.argmax()) - 1, 8) for row in pattern[:, middle]]
    assert looked == [(2, 3), (4, 3), (3, 2), (3, 4)]
