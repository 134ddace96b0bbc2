"""Tensor types and the one vocabulary of dimension names.

Dimension names used in annotations everywhere:

- ``batch`` examples · ``position`` places in the language model's sequence · ``query``, ``key`` positions in attention
- ``layer`` · ``head`` · ``d_model`` · ``d_head`` · ``vocab``
- ``image`` · ``view`` · ``rows``, ``columns`` of a view's grid · ``token`` visual tokens · ``patch`` · ``d_vision``
- ``height``, ``width`` pixels of an original image
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

PixelMask = Bool[np.ndarray, "height width"]
PositionMask = Bool[np.ndarray, " position"]
Positions = Int[np.ndarray, " selected"]
Grid = Float[np.ndarray, "rows columns"]
BoolGrid = Bool[np.ndarray, "rows columns"]

Logits = Float[Tensor, "batch position vocab"]
Residual = Float[Tensor, "batch position d_model"]
Pattern = Float[Tensor, "batch head query key"]
TokenIds = Int[Tensor, "batch position"]

Box = tuple[float, float, float, float]
"""``(x0, y0, x1, y1)`` in pixels of the original image unless a docstring says otherwise; x1 and y1 are exclusive."""

PILImage = Image.Image
