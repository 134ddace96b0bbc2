"""What is shown: drawn scenes with masks, questions about them and clean/corrupted pairs."""

from sightlens.stimuli import edits, questions, shapes
from sightlens.stimuli.stimulus import Box, NegativeKind, Pair, Question, SceneObject, Stimulus, Task

__all__ = ["Box", "NegativeKind", "Pair", "Question", "SceneObject", "Stimulus", "Task", "edits", "questions", "shapes"]
