"""What is shown: drawn scenes and photographs with masks, questions about them, and clean/corrupted pairs."""

from sightlens.stimuli import edits, questions, shapes
from sightlens.stimuli.inpaint import Inpainter, LaMa, MeanFill, OpenCV
from sightlens.stimuli.pair_folder import PairEntry, PairFolder, PairRecipe, build_pairs, named_then_gone
from sightlens.stimuli.photos import CocoSegmentation, IndexedPixels, Photo, PhotoObject, Rectangle
from sightlens.stimuli.readers import ImageFolder, folder_images, read_coco, read_voc
from sightlens.stimuli.removal import PhotoWording, SizeFilter, remove_object
from sightlens.stimuli.stimulus import Box, NegativeKind, Pair, Question, SceneObject, Stimulus, Task

__all__ = [
    "Box",
    "CocoSegmentation",
    "ImageFolder",
    "IndexedPixels",
    "Inpainter",
    "LaMa",
    "MeanFill",
    "NegativeKind",
    "OpenCV",
    "Pair",
    "PairEntry",
    "PairFolder",
    "PairRecipe",
    "Photo",
    "PhotoObject",
    "PhotoWording",
    "Question",
    "Rectangle",
    "SceneObject",
    "SizeFilter",
    "Stimulus",
    "Task",
    "build_pairs",
    "edits",
    "folder_images",
    "named_then_gone",
    "questions",
    "read_coco",
    "read_voc",
    "remove_object",
    "shapes",
]
