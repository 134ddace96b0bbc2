"""Pure functions from numbers and texts to scores; they know no model."""

from __future__ import annotations

from sightlens.metrics.answers import (
    count_accuracy,
    count_hits,
    existence_matches,
    names_object,
    number_avoidance,
    parse_count,
    yes_no,
)
from sightlens.metrics.bootstrap import Interval, bootstrap_difference, bootstrap_mean, bootstrap_statistic
from sightlens.metrics.box_formats import BinTokens, BoxFormat, Frame, PerMille, ResizedPixels, UnitSquare, frame_box
from sightlens.metrics.boxes import box_ious, expand_box, iou, is_box, size_bin
from sightlens.metrics.curves import Curve, nauc
from sightlens.metrics.json_boxes import JsonBox
from sightlens.metrics.likelihood import (
    answer_logprobs,
    answer_probability,
    form_probability,
    logit_difference,
    mean_nll,
    perplexity,
)
from sightlens.metrics.localization import LocMetric, loc, overlaps
from sightlens.metrics.overlap import Overlap, topk_overlap
from sightlens.metrics.paired import PairedTest, paired_test
from sightlens.metrics.points import Point, PointTags, point_hit
from sightlens.metrics.recovery import (
    Mediation,
    causal_influence,
    mediation,
    mediation_fraction,
    mediation_ratios,
    normalised_effect,
    probability_drop,
    usable_pairs,
)

__all__ = [
    "BinTokens",
    "BoxFormat",
    "Curve",
    "Frame",
    "Interval",
    "JsonBox",
    "LocMetric",
    "Mediation",
    "Overlap",
    "PairedTest",
    "PerMille",
    "Point",
    "PointTags",
    "ResizedPixels",
    "UnitSquare",
    "answer_logprobs",
    "answer_probability",
    "bootstrap_difference",
    "bootstrap_mean",
    "bootstrap_statistic",
    "box_ious",
    "causal_influence",
    "count_accuracy",
    "count_hits",
    "existence_matches",
    "expand_box",
    "form_probability",
    "frame_box",
    "iou",
    "is_box",
    "loc",
    "logit_difference",
    "mean_nll",
    "mediation",
    "mediation_fraction",
    "mediation_ratios",
    "names_object",
    "nauc",
    "normalised_effect",
    "number_avoidance",
    "overlaps",
    "paired_test",
    "parse_count",
    "perplexity",
    "point_hit",
    "probability_drop",
    "size_bin",
    "topk_overlap",
    "usable_pairs",
    "yes_no",
]
