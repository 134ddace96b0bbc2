"""HookedVLM: a vision-language model whose activations have names and whose positions have names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sightlens._types import Logits
from sightlens.families import ImageOptions, ItemList, Processing, Prompt, Wording
from sightlens.families.compat import check_versions, lens_config, unwrap_bridge
from sightlens.families.processing import Images, Template
from sightlens.interventions import MERGED, Intervention, Mean
from sightlens.interventions.means import Parts
from sightlens.metrics import BoxFormat
from sightlens.model.agreement import Check, cached_logits, compare_paths
from sightlens.model.apply import applied, with_companions
from sightlens.model.cache import Cache
from sightlens.model.generation import Keep, generation_settings, kept_logits
from sightlens.model.hooking import HookFunction, HookName, Hooks, NameFilter, add_hooks, check_kept, find_addresses, keeper, listening
from sightlens.model.inputs import all_donors, check_inputs
from sightlens.model.loading import load_checkpoint, processing_for
from sightlens.model.rows import Row, Touched
from sightlens.model.site_mean import mean_over
from sightlens.model.sites import Sites
from sightlens.model.taps import LiveSite
from sightlens.model.values import Donor


class HookedVLM:
    """A vision-language model in HF's own code, with TransformerLens hook points that also take selectors.

    Hook names are TransformerLens' own (``blocks.3.hook_resid_post``, ``blocks.3.attn.hook_z``); an address such as
    ``blocks.3.attn.hook_z@tile[0,1]`` reads and writes only the named positions. Without hooks the model runs HF's code
    untouched, at HF's speed.

    Attributes:
        hf: the HF model.
        processing: from images and texts to prompts.
        cfg: the TransformerLens config (``d_model``, ``n_heads``, ``n_layers``, …).
        donors: values that interventions take by name, such as ``"mean"``.
    """

    def __init__(self, hf: PreTrainedModel, processing: Processing, *, name: str = "model", box_format: BoxFormat | None = None) -> None:
        """Put hook points on an HF model; use :meth:`from_pretrained`, :meth:`from_hf` or :meth:`from_bridge`.

        Args:
            hf: the HF model; it is not changed, and hooks act on it in place.
            processing: of the same checkpoint.
            name: for records and messages.
            box_format: how this checkpoint writes boxes; the family's published format when None.
        """
        check_versions()
        processing.family.check_config(hf.config)
        self.hf, self.processing, self.name = hf, processing, name
        family = processing.family
        self.sites = Sites(hf, family.sites(hf.config), grid=processing.grid, bidirectional_images=family.bidirectional_images)
        self.cfg = lens_config(hf, name)
        self.donors: dict[str, Donor] = {}
        self._box_format = box_format

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        check: bool = True,
    ) -> HookedVLM:
        """Load a checkpoint: a shipped model, a local folder, or a hub id.

        Args:
            name: ``"sightlens/tiny-llava"``, ``"sightlens/tiny-internvl"``, a folder, or a hub id.
            revision: of a hub id.
            dtype: of the weights; ``"auto"`` takes the checkpoint's, and float32 for float16 on a CPU.
            device: where the whole model goes; the CPU when None.
            device_map: accelerate's, instead of ``device``.
            check: whether to run :meth:`self_check` on the loaded model.

        Raises:
            CheckpointError: a missing, truncated or mismatched file; every missing or unexpected key is named.
            FamilyError: an unknown family or configuration.
        """
        loaded = load_checkpoint(name, revision=revision, dtype=dtype, placement=device_map if device_map is not None else device)
        model = cls(
            loaded.hf, loaded.processing, name=str(name) if revision is None else f"{name}@{revision}", box_format=loaded.box_format
        )
        if loaded.mean is not None:
            model.donors["mean"] = loaded.mean
        if check:
            model.self_check()
        return model

    @classmethod
    def from_hf(cls, hf: PreTrainedModel, processor: Any) -> HookedVLM:
        """Wrap an HF model that is already in memory.

        Args:
            hf: of a known family.
            processor: HF's, or anything with ``tokenizer`` and ``image_processor``; for a language model its tokenizer.

        Raises:
            FamilyError: an unknown family or configuration.
        """
        alone = isinstance(processor, PreTrainedTokenizerBase)
        tokenizer, images = (processor, None) if alone else (processor.tokenizer, processor.image_processor)
        return cls(hf, processing_for(hf.config, tokenizer, images), name=hf.config.name_or_path or type(hf).__name__)

    @classmethod
    def from_bridge(cls, bridge: Any, processor: Any) -> HookedVLM:
        """Take over the HF model inside a TransformerLens ``TransformerBridge``.

        The bridge has rebuilt its modules and made it eager; both are undone (sdpa), so do not use the bridge afterwards.
        """
        unwrap_bridge(bridge.original_model).set_attn_implementation("sdpa")
        return cls.from_hf(bridge.original_model, processor)

    def __repr__(self) -> str:
        """Name, family and size."""
        size = f"{self.cfg.n_layers} layers × {self.sites.n_heads} heads, {len(self.sites.points)} hooks"
        return f"HookedVLM({self.name}: {self.processing.family.name}, {size})"

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.hf.device

    @property
    def unembedding(self) -> nn.Module:
        """From the last hidden state to logits."""
        return self.hf.lm_head  # pyright: ignore[reportReturnType]  # every family's model has one

    @property
    def attention(self) -> str:
        """The attention path of layers that nobody looks into, such as ``sdpa`` or ``eager``."""
        return self.hf.config._attn_implementation  # pyright: ignore[reportReturnType]  # a model in memory has chosen one

    @property
    def tokenizer(self) -> Any:
        """HF's tokenizer."""
        return self.processing.tokenizer

    @property
    def box_format(self) -> BoxFormat:
        """How this checkpoint writes boxes."""
        return self._box_format or self.processing.box_format

    @property
    def hook_dict(self) -> dict[str, LiveSite]:
        """Every hook point by name."""
        return dict(self.sites.points)

    def prepare(
        self,
        images: Images | Sequence[Images],
        text: str | ItemList | Sequence[str | ItemList],
        *,
        template: Template = "chat",
        system: str | None = None,
        options: ImageOptions | None = None,
    ) -> Prompt:
        """Turn images and text into tensors, exactly as HF's processor does, and say what every position is.

        Args:
            images: PIL images, arrays, paths or bytes. For one text: one image, a list of images, or None. For a list of
                texts: one such entry each; the batch is padded on the left.
            text: the question, an ``ItemList`` (a list whose items have names, and a question about it), or a list of them.
            template: ``"chat"``, or ``"raw"`` for text that already holds the image placeholder.
            system: a system message for the chat template.
            options: how images become views; :class:`ImageOptions` says what each family takes.

        Raises:
            ImageError, PromptError, FamilyError: when an input cannot be used; the message says why.
        """
        wording = Wording(template, system)
        return self.processing.prepare(images, text, wording=wording, options=options or ImageOptions()).to(self.device)

    def __call__(
        self,
        prompt: Prompt,
        *,
        interventions: Sequence[Intervention] = (),
        donors: Mapping[str, Donor] | None = None,
        keep: Keep = "all",
    ) -> Logits:
        """Run the model.

        Args:
            prompt: from :meth:`prepare`.
            interventions: applied in order.
            donors: values that interventions take by name, beside ``model.donors``.
            keep: logits of all positions, or of the last only.

        Returns:
            Logits ``[batch, position, vocab]``.
        """
        with self._running(prompt, interventions, donors):
            return self.hf(**prompt.tensors, use_cache=False, logits_to_keep=kept_logits(keep)).logits

    def run_with_hooks(
        self,
        prompt: Prompt,
        *,
        fwd_hooks: Hooks = (),
        interventions: Sequence[Intervention] = (),
        donors: Mapping[str, Donor] | None = None,
    ) -> Logits:
        """Run the model with hook functions ``fn(activation, hook)`` at names or addresses, as TransformerLens does.

        Backward hooks need :meth:`hooks`, kept open around the backward pass.

        Args:
            prompt: from :meth:`prepare`.
            fwd_hooks: ``(name, function)``, the name also a pattern, an address, or a function of the name as in
                :meth:`run_with_cache`; what the hook function returns, or edits in place, replaces what it saw.
            interventions: applied before the hooks, which see what they made.
            donors: values that interventions take by name.

        Returns:
            Logits ``[batch, position, vocab]``.
        """
        with self._running(prompt, interventions, donors), self.hooks(fwd_hooks=fwd_hooks):
            return self.hf(**prompt.tensors, use_cache=False).logits

    def run_with_cache(
        self,
        prompt: Prompt,
        *,
        names_filter: NameFilter = None,
        interventions: Sequence[Intervention] = (),
        donors: Mapping[str, Donor] | None = None,
        keep: Keep = "all",
    ) -> tuple[Logits, Cache]:
        """Run the model and keep activations.

        Args:
            prompt: from :meth:`prepare`.
            names_filter: names, patterns (``blocks.*.hook_resid_post``) or addresses (``blocks.3.hook_resid_post@image``,
                which keeps only that part), or a function of the name. None keeps everything but ``hook_result``.
            interventions: applied before anything is kept.
            donors: values that interventions take by name.
            keep: logits of all positions, or of the last only.

        Returns:
            Logits ``[batch, position, vocab]`` and the cache.
        """
        kept: dict[str, Tensor] = {}
        addresses = find_addresses(self.sites, names_filter)
        keepers = [(str(address), keeper(address, self.sites.point(address.name), kept)) for address in addresses]
        with self._running(prompt, interventions, donors):
            with self.hooks(fwd_hooks=keepers):
                logits = self.hf(**prompt.tensors, use_cache=False, logits_to_keep=kept_logits(keep)).logits
            window = self.sites.window.snapshot()
        check_kept(addresses, kept, images="pixel_values" in prompt.tensors)
        return logits, Cache(kept, {name: point.site for name, point in self.sites.points.items()}, window)

    def generate(
        self,
        prompt: Prompt,
        *,
        interventions: Sequence[Intervention] = (),
        donors: Mapping[str, Donor] | None = None,
        max_new_tokens: int = 64,
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Generate text with HF's own ``generate``; interventions act at absolute positions at every step.

        Args:
            prompt: from :meth:`prepare`.
            interventions: applied in order.
            donors: values that interventions take by name.
            max_new_tokens: at most so many.
            options: more of HF's generation options (``do_sample``, ``use_cache``, ``stop_strings``, …); greedy without them.

        Returns:
            One text per example, special tokens left out.
        """
        ids = self.generate_ids(prompt, interventions=interventions, donors=donors, max_new_tokens=max_new_tokens, options=options)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def generate_ids(
        self,
        prompt: Prompt,
        *,
        interventions: Sequence[Intervention] = (),
        donors: Mapping[str, Donor] | None = None,
        max_new_tokens: int = 64,
        options: Mapping[str, Any] | None = None,
    ) -> Int[Tensor, "batch new"]:
        """Generate token ids; see :meth:`generate`."""
        settings, inputs = generation_settings(options, max_new_tokens=max_new_tokens, tokenizer=self.tokenizer), prompt.generation_inputs()
        with self._running(prompt, interventions, donors), torch.no_grad():
            ids = self.hf.generate(**inputs, **settings)  # pyright: ignore[reportCallIssue]  # not every PreTrainedModel has it
        return ids[:, inputs["input_ids"].shape[1] :]

    def to(self, device: torch.device | str) -> HookedVLM:
        """Move the model to another device, and return it."""
        self.hf.to(device)  # pyright: ignore[reportArgumentType]  # HF's decorator hides the signature
        return self

    def to_tokens(self, text: str) -> Int[Tensor, "1 position"]:
        """Return the ids of a text, with the special tokens the tokenizer adds; images need :meth:`prepare`."""
        return self.tokenizer(text, return_tensors="pt")["input_ids"].to(self.device)

    def to_str_tokens(self, text: str) -> list[str]:
        """Return the tokens of a text as strings."""
        return [self.tokenizer.decode([index]) for index in self.to_tokens(text)[0].tolist()]

    def probe(self) -> Prompt:
        """Return a small prompt, with a picture if this model takes any, for checks."""
        if not self.processing.family.images:
            return self.prepare(None, "what is this ?", template="raw")
        pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        return self.prepare(pixels, f"{self.processing.family.template_image} what is this ?", template="raw")

    @torch.no_grad()
    def self_check(self) -> tuple[Check, ...]:
        """Compare logits on a probe: hooked, stepwise and cached paths against HF's own fused one.

        Raises:
            CheckpointError: when they disagree.
        """
        prompt = self.probe()
        paths = {
            "hooked model against HF": self(prompt),
            "stepwise against fused attention": self.run_with_cache(prompt, names_filter="blocks.*.attn.hook_pattern")[0],
            "cached against uncached last step": cached_logits(self.hf, prompt),
        }
        return compare_paths(self.hf(**prompt.tensors, use_cache=False).logits, paths, self.hf.dtype)

    @contextmanager
    def hooks(self, *, fwd_hooks: Hooks = (), bwd_hooks: Hooks = ()) -> Iterator[HookedVLM]:
        """Keep hooks on while the context is open; they are removed whatever happens."""
        with listening(self.sites, fwd_hooks=fwd_hooks, bwd_hooks=bwd_hooks):
            yield self

    def add_hook(self, name: HookName, function: HookFunction, *, dir: Literal["fwd", "bwd"] = "fwd") -> None:
        """Add a hook that stays until :meth:`reset_hooks`; names are those of :meth:`run_with_hooks`."""
        with ExitStack() as stack:  # all of them or none
            for point, handle in add_hooks(self.sites, name, function, dir):
                stack.callback(point.drop, handle)
            stack.pop_all()

    def reset_hooks(self) -> None:
        """Remove every hook, permanent ones too."""
        for point in self.sites.points.values():
            point.remove_hooks("both", including_permanent=True)

    def with_answers(self, prompt: Prompt, answers: str | Sequence[str]) -> Prompt:
        """Append answers to be read by teacher forcing: token t is predicted at the position before it.

        Args:
            prompt: from :meth:`prepare`.
            answers: one per example, all of equally many tokens; a string serves every example.

        Raises:
            PromptError: when they are empty or of different lengths.
        """
        texts = [answers] * len(prompt) if isinstance(answers, str) else list(answers)
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return prompt.with_answers(ids, [self.tokenizer.convert_ids_to_tokens(answer) for answer in ids])

    @torch.no_grad()
    def fit_mean(self, prompts: Iterable[Prompt], *, source: str, site: str = MERGED, by: Parts = "all") -> Mean:
        """Average what a site holds of the visual tokens of prompts, and keep the result as the donor ``"mean"``.

        Args:
            prompts: with images.
            source: what they are, for provenance (``"ImageNet-val, 50,000 images"``).
            site: where; in the tower, over the patches that the tokens show.
            by: ``"all"`` for one mean, ``"view"`` for one per kind of view, ``"position"`` for one per place in its grid too.

        Raises:
            InterventionError: for a site without visual tokens, or with heads, or when no prompt has an image.
        """
        names = with_companions(self.sites, [site], follow=True)
        caches = (self.run_with_cache(prompt, names_filter=names)[1] for prompt in prompts)
        mean = self.donors["mean"] = mean_over(caches, names, source=source, by=by)
        return mean

    @contextmanager
    def _running(self, prompt: Prompt, interventions: Sequence[Intervention], donors: Mapping[str, Donor] | None) -> Iterator[None]:
        given = all_donors(self.donors, donors)
        check_inputs(self.processing, prompt, interventions, given)
        rows = [Row(example, tuple(interventions)) for example in range(len(prompt))]
        touched = Touched()
        with self.sites.window.showing(prompt.layouts, range(len(prompt))), applied(self.sites, rows, given, touched=touched):
            yield
        touched.check(rows)
