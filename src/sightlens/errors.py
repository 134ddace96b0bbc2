"""The one tree of errors that SightLens raises on bad input.

Every message says what was expected, what came, and what to do. `assert` is kept for our own bugs.
"""

from __future__ import annotations

from collections.abc import Sequence


class SightLensError(Exception):
    """Something the user gave cannot be used; the message says what to do instead."""

    def __init__(self, expected: str, got: str, do: str) -> None:
        """Build the message from its three parts.

        Args:
            expected: what would have been accepted.
            got: what came instead.
            do: the next step for the user.
        """
        super().__init__(f"expected {expected}; got {got}. {do}")
        self.expected, self.got, self.do = expected, got, do

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """Pickle by the three parts, so that errors cross process borders."""
        return type(self), (self.expected, self.got, self.do)


class ImageError(SightLensError):
    """An image is corrupt, of an unknown mode, or of a size no layout exists for."""


class PromptError(SightLensError):
    """A text or a batch does not fit its images or the model's tokenizer."""


class LayoutError(SightLensError):
    """A layout contradicts the tensors, the model, or itself."""


class SelectorError(SightLensError):
    """A selector cannot be parsed, or selects nothing."""


class MaskError(SightLensError):
    """An object mask has the wrong type or size, or is empty."""


class HookError(SightLensError):
    """A hook name is unknown, or a hook function returned a tensor that does not fit."""


class InterventionError(SightLensError):
    """An intervention cannot be applied, or would silently change nothing."""


class CheckpointError(SightLensError):
    """A checkpoint is missing, truncated, or does not match the model exactly."""


class FamilyError(SightLensError):
    """A model belongs to no known family, or uses a configuration the family refuses."""


class VersionError(SightLensError):
    """An installed library is outside the tested range."""


class MetricError(SightLensError):
    """A metric was given values it is not defined for."""


class StimulusError(SightLensError):
    """A stimulus cannot be drawn or read as asked."""


class EngineError(SightLensError):
    """A plan cannot be made or run: no cells, an unknown way of reading, too little memory."""


class StudyError(SightLensError):
    """A study is not well formed: unknown axis, no cells, no stimuli."""


class ProbeError(SightLensError):
    """A probe is given activations or settings that it cannot learn from."""


class StoreError(SightLensError):
    """A result store is damaged, or was written by another study or model."""


class ExtraError(SightLensError):
    """An optional dependency is not installed."""

    @classmethod
    def missing(cls, package: str, extra: str) -> ExtraError:
        """Name the extra that brings a package."""
        return cls(f"the package {package!r}", "no such package", f"Install it with `pip install 'sightlens[{extra}]'`.")


def listing(names: Sequence[str], *, limit: int = 12) -> str:
    """Print names for an error message, the first few and how many more.

    >>> listing(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def one_line(problem: Exception) -> str:
    r"""Return another library's message as one line; a type check's long tail, which repeats the call, is left out.

    >>> one_line(TypeError("The problem arose\nActual value: 3\n-----\nCalled with …"))
    'The problem arose Actual value: 3'
    """
    return " ".join(str(problem).partition("\n---")[0].split())
