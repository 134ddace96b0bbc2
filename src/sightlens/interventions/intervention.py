"""Interventions: what is changed in a forward pass, as frozen data that prints, compares, hashes and survives JSON."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

from sightlens.errors import InterventionError, listing, one_line
from sightlens.interventions.where import Where, freeze_where, resolve_where, where_from_data, where_to_data
from sightlens.layout import Layout

Phase = Literal["prefill", "decode"]
Mode = Literal["replace", "add", "interpolate"]
MERGED = "hook_merged_embed"

_KINDS: dict[str, type[Intervention]] = {}
T = TypeVar("T", bound="type[Intervention]")


class Intervention(ABC):
    """One change to a forward pass."""

    kind: ClassVar[str]
    places: ClassVar[tuple[str, ...]]
    """The fields that hold positions."""

    def __post_init__(self) -> None:
        """Freeze positions and check what can be checked without a model."""
        for name in self.places:
            object.__setattr__(self, name, freeze_where(getattr(self, name)))
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            InterventionError: saying which.
        """

    @property
    def donors(self) -> tuple[str, ...]:
        """The names of the values it takes from outside."""
        return ()

    def require(self, layout: Layout) -> None:
        """Refuse an example in which a field of positions selects nothing.

        Raises:
            SelectorError: saying which.
        """
        for place in self.places:
            resolve_where(getattr(self, place), layout).require(place)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data that :func:`from_dict` reads back to an equal intervention."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        plain = {name: where_to_data(value) if name in self.places else _plain(value) for name, value in values.items()}
        return {"kind": self.kind, **plain}


def register(cls: T) -> T:
    """Make a kind of intervention readable by :func:`from_dict`."""
    _KINDS[cls.kind] = cls
    return cls


def from_dict(data: Mapping[str, Any]) -> Intervention:
    """Read an intervention from JSON data.

    Raises:
        InterventionError: on an unknown kind, or a field that is unknown, missing, or of a wrong type.
        SelectorError: when a selector does not parse.
    """
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InterventionError(f"a kind among {listing(sorted(_KINDS))}", repr(kind), "Check the data.")
    cls = _KINDS[kind]
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := set(data) - known - {"kind"}:
        raise InterventionError(f"fields of {kind} ({listing(sorted(known))})", listing(sorted(unknown)), "Check the spelling.")
    values = {name: where_from_data(value) if name in cls.places else _tuples(value) for name, value in data.items() if name != "kind"}
    try:
        return cls(**values)
    except TypeError as problem:
        raise InterventionError(f"the fields of {kind} ({listing(sorted(known))})", one_line(problem), "Mend the data.") from problem


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _check_numbers(values: Sequence[int] | None, what: str) -> None:
    if values is not None and (len(values) == 0 or min(values) < 0 or len(set(values)) < len(values)):
        raise InterventionError(f"{what}: at least one, not negative, none twice", f"{values}", "Use None for all of them.")


@register
@dataclass(frozen=True)
class Ablate(Intervention):
    """Replace activations at some positions by something that carries no information about them.

    ``value`` is ``"zero"``; ``"mean"``, the dataset mean that the model was given (Schaumlöffel et al. 2026,
    arXiv 2605.19792: object tokens to the mean projector output); ``"noise"``, the activation plus Gaussian noise of
    ``scale`` standard deviations of that activation's own numbers (after Meng et al. 2022, arXiv 2202.05262, 3σ);
    or the name of a donor vector ``[d_model]``. Positions count and order stay as they are. At a site of the vision tower, ``at``
    selects visual tokens too, and the patches that they show are replaced (``[d_vision]``); a class token never is.

    At the merged embedding of a model that adds visual features again in early layers (Qwen3-VL's DeepStack), these are
    replaced alike: by zero, by their own dataset mean, by themselves plus noise; by zero beside a donor vector. With
    ``reinjected=False`` they stay, and the image content comes back in.
    """

    kind: ClassVar[str] = "ablate"
    places: ClassVar[tuple[str, ...]] = ("at",)

    at: Where
    value: str = "mean"
    site: str = MERGED
    heads: tuple[int, ...] | None = None
    scale: float = 3.0
    """Of the noise, in standard deviations; other values ignore it."""
    seed: int = 0
    reinjected: bool = True
    """Whether visual features that the model adds again later are replaced too."""

    @property
    def donors(self) -> tuple[str, ...]:
        """The names of the values it takes from outside."""
        return () if self.value in ("zero", "noise") else (self.value,)

    def check(self) -> None:
        """Refuse empty or repeated heads and a scale that is not positive and finite."""
        _check_numbers(self.heads, "heads")
        if not 0 < self.scale < math.inf:
            raise InterventionError("a finite positive scale", f"{self.scale}", "Leave out the intervention instead.")


@register
@dataclass(frozen=True)
class PatchIn(Intervention):
    """Put activations of another run at some positions.

    ``donor`` names the other run's cache among those that are given with it:
    ``_, cache = model.run_with_cache(other, names_filter=[site])``, then
    ``model(prompt, interventions=[PatchIn(site, at=…)], donors={"clean": cache})``.
    ``site`` may hold ``*`` for the layer, with ``layers`` choosing which (None: all). ``source`` are the positions in the
    donor's own layout, ``at`` those written here; both select equally many, in order, and generated positions stay as they
    are. In the vision tower these are the patches that visual tokens show, token by token; at ``hook_attn_scores`` and
    ``hook_pattern`` the queries, whose rows over all keys are written. ``mode`` replaces, adds (``x + alpha · donor``) or
    interpolates (``x + alpha · (donor − x)``). Patching a run with itself changes nothing, bit for bit. At the merged
    embedding, visual features that the model adds again in early layers (Qwen3-VL's DeepStack) are patched in from the donor
    too, unless ``reinjected`` is False.
    """

    kind: ClassVar[str] = "patch_in"
    places: ClassVar[tuple[str, ...]] = ("at", "source")

    site: str
    donor: str = "clean"
    at: Where = "all"
    source: Where = None  # type: ignore[assignment]
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    mode: Mode = "replace"
    alpha: float = 1.0
    reinjected: bool = True

    def __post_init__(self) -> None:
        """Take ``source`` from ``at`` when it is left out."""
        if self.source is None:
            object.__setattr__(self, "source", self.at)
        super().__post_init__()

    @property
    def donors(self) -> tuple[str, ...]:
        """The names of the values it takes from outside."""
        return (self.donor,)

    def check(self) -> None:
        """Refuse layers without a pattern, and an unknown mode."""
        _check_numbers(self.heads, "heads")
        _check_numbers(self.layers, "layers")
        if self.layers is not None and "*" not in self.site:
            raise InterventionError("`*` for the layer in the site when layers are given", self.site, "Write blocks.*.…")
        if self.mode not in ("replace", "add", "interpolate"):
            raise InterventionError("mode replace, add or interpolate", repr(self.mode), "Check the spelling.")


@register
@dataclass(frozen=True)
class Knockout(Intervention):
    """Remove attention edges from query positions to key positions before the softmax.

    The remaining keys share the mass. ``layers`` and ``heads`` None means all. With ``"decode"`` among the phases,
    generated positions that the query selector takes in (``post_image``, ``answer``, ``text``, ``all``) are cut off too.
    Geva et al. 2023 (arXiv 2304.14767); windows and selectors of Schaumlöffel et al. 2026 (arXiv 2605.19792).
    """

    kind: ClassVar[str] = "knockout"
    places: ClassVar[tuple[str, ...]] = ("queries", "keys")

    queries: Where
    keys: Where
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    phases: tuple[Phase, ...] = ("prefill", "decode")

    def check(self) -> None:
        """Refuse empty layers, heads or phases."""
        _check_numbers(self.layers, "layers")
        _check_numbers(self.heads, "heads")
        _check_phases(self.phases)


@register
@dataclass(frozen=True)
class AblateHeads(Intervention):
    """Replace the output of many heads, each given as ``(layer, head)``, before the output projection (``hook_z``).

    ``value`` is ``"zero"``, or ``"mean"`` for the donor ``"head_mean"`` ``[layer, head, d_head]``, which
    `sightlens.model.fit_head_mean` measures. Heads are query heads. Schaumlöffel et al. 2026 (arXiv 2605.19792), cumulative head
    ablation: zero, at every position and every step of decoding.
    """

    kind: ClassVar[str] = "ablate_heads"
    places: ClassVar[tuple[str, ...]] = ("at",)

    heads: tuple[tuple[int, int], ...]
    value: Literal["zero", "mean"] = "zero"
    at: Where = "all"
    phases: tuple[Phase, ...] = ("prefill", "decode")

    @property
    def donors(self) -> tuple[str, ...]:
        """The names of the values it takes from outside."""
        return ("head_mean",) if self.value == "mean" else ()

    def check(self) -> None:
        """Refuse heads that are none, negative or repeated, and unknown phases."""
        if not self.heads or len(set(self.heads)) < len(self.heads) or min(map(min, self.heads)) < 0:
            raise InterventionError("(layer, head) pairs: at least one, not negative, none twice", f"{self.heads}", "Count from 0.")
        _check_phases(self.phases)

    def by_layer(self) -> dict[int, tuple[int, ...]]:
        """Return the heads of each layer, both ascending."""
        layers = sorted({layer for layer, _ in self.heads})
        return {layer: tuple(sorted(head for at, head in self.heads if at == layer)) for layer in layers}


def _check_phases(phases: Sequence[str]) -> None:
    if not phases or not set(phases) <= {"prefill", "decode"}:
        raise InterventionError("phases among prefill and decode", f"{tuple(phases)}", "Name at least one.")
