"""Language models without pictures, behind the same calls: Llama, Mistral, Qwen2 and Qwen2.5, Qwen3.

``model.prepare(None, text)``, or ``model.prepare(None, ItemList(…))`` for a list whose items have names. There is nothing to
merge: ``hook_merged_embed``, where interventions on embeddings act by default, is the embedding itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from PIL import Image
from transformers import PreTrainedConfig

from sightlens.errors import FamilyError
from sightlens.families.family import Family, Grid, ImageOptions, Place, ViewedImage
from sightlens.families.sites import DecoderNames, Input, Site, decoder_shape, decoder_sites
from sightlens.metrics import BoxFormat

NAMES = DecoderNames(layers="model.layers", norm="model.norm", embed="model.embed_tokens", decoder="model")


class TextFamily(Family):
    """A decoder that reads text alone."""

    template_image = ""
    images = False

    def check_config(self, config: PreTrainedConfig) -> None:
        """Nothing in these configurations changes the layout."""

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the decoder's hook names."""
        listed = decoder_sites(decoder_shape(config), NAMES)
        # the decoder embeds its ids itself, so its first layer is the first to be given embeddings
        first = {"module": f"{NAMES.layers}.0", "tap": Input(first=True), "hf": "embed_tokens output"}
        return tuple(replace(site, **first) if site.name == "hook_merged_embed" else site for site in listed)

    def image_token_id(self, config: PreTrainedConfig) -> int | None:
        """No position is visual."""
        return None

    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """No view."""
        return Grid(0, 0)

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Refuse pictures."""
        self._refuse()

    def box_format(self, processor: Any) -> BoxFormat:
        """Refuse boxes."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FamilyError("a family that takes pictures", f"{self.name}, which reads text alone", "Use a vision-language model.")


class Llama(TextFamily):
    """Llama 2 and 3 (8B), Vicuna; text alone."""

    name = "llama"
    model_type = "llama"
    architecture = "LlamaForCausalLM"


class Mistral(TextFamily):
    """Mistral; text alone."""

    name = "mistral"
    model_type = "mistral"
    architecture = "MistralForCausalLM"


class Qwen2(TextFamily):
    """Qwen2 and Qwen2.5 (7B); text alone."""

    name = "qwen2"
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"


class Qwen3(TextFamily):
    """Qwen3 (8B); text alone."""

    name = "qwen3"
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
