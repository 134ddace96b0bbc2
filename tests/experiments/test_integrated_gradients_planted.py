"""Integrated gradients find the token that a planted circuit reads."""

from __future__ import annotations

import numpy as np
import pytest

from sightlens.experiments import Integration, Trial, integrated_gradients
from sightlens.model import HookedVLM
from sightlens.stimuli import Question
from sightlens.zoo import planted

pytest.importorskip("captum")
TEMPLATE = (
    "{% for m in messages %}USER: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>\n{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)


@pytest.mark.parametrize("channels", ["abs_then_sum", "sum_then_abs"])
def test_the_object_token_scores_highest(channels):
    built = planted.build()
    built.processor.tokenizer.chat_template = TEMPLATE
    model = HookedVLM.from_hf(built.model, built.processor)
    cells = list(np.ndindex(planted.GRID, planted.GRID))
    model.fit_mean([model.prepare(planted.picture(row, column), "where ?") for row, column in cells], source="planted pictures")
    settings = Integration(steps=200, channels=channels, rows=50)  # the circuit switches suddenly, so few steps leave a large gap
    for row, column in cells[::3]:
        trial = Trial(f"{row}{column}", planted.picture(row, column), Question("classification", "where ?", planted.answer(row, column)))
        found = integrated_gradients(model, trial, settings=settings)
        assert divmod(int(found.scores.argmax()), planted.GRID) == (row, column)
        first, second = np.sort(found.scores)[[-1, -2]]
        assert first > 10 * second
        assert found.relative_gap < 0.15
