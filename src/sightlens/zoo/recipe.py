"""What each shipped model is and how it is trained: frozen numbers, and the Hugging Face configuration made from them."""

from dataclasses import dataclass, field

from transformers import InternVLConfig, LlavaConfig, PreTrainedTokenizerBase

from sightlens.stimuli.shapes import Style
from sightlens.zoo.vocabulary import internvl_tokenizer, llava_tokenizer

TRAINING_SEED = 1
HELD_OUT_SEED = 900_001


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network. `grid` is the side of the square of visual tokens of one view."""

    view: int
    patch: int
    grid: int
    tower_width: int
    tower_layers: int
    tower_heads: int
    width: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Layout:
    """Pictures that become the same number of views; a batch is drawn from one layout. `share` is its part of training."""

    views: int
    share: float
    styles: tuple[Style, ...]


@dataclass(frozen=True)
class Schedule:
    """How training proceeds. Everything but the batch depends on the fraction of the time that has passed."""

    batch: int = 10
    muon: float = 0.015
    adam: float = 2.5e-3
    warmup: float = 0.01
    tower_only: float = 0.12
    cooldown: float = 0.4
    sharp: float = 0.7
    blur: tuple[float, float] = (2.0, 0.5)
    helper: tuple[float, float] = (1.0, 0.2)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a shipped model besides the seed and the minutes."""

    name: str
    sizes: Sizes
    layouts: tuple[Layout, ...]
    schedule: Schedule = field(default_factory=Schedule)


LLAVA = Recipe(
    name="llava",
    sizes=Sizes(view=64, patch=8, grid=8, tower_width=96, tower_layers=4, tower_heads=4, width=96, layers=6, heads=4),
    layouts=(
        Layout(
            views=1,
            share=1.0,
            styles=(
                *[Style()] * 6,
                Style(64, 48),
                Style(48, 64),
                Style(96, 96, scale=1.5),
                Style(96, 72, scale=1.5),
            ),
        ),
    ),
)
INTERNVL = Recipe(
    name="internvl",
    schedule=Schedule(batch=8),
    sizes=Sizes(view=32, patch=4, grid=4, tower_width=64, tower_layers=4, tower_heads=4, width=96, layers=6, heads=4),
    layouts=(
        Layout(views=5, share=0.6, styles=(*[Style()] * 4, Style(72, 64), Style(96, 96, scale=1.5))),
        Layout(views=3, share=0.18, styles=(Style(64, 32), Style(32, 64))),
        Layout(views=4, share=0.08, styles=(Style(96, 32), Style(32, 96))),
        Layout(views=1, share=0.14, styles=(Style(40, 40), Style(32, 32))),
    ),
)
RECIPES = {"llava": LLAVA, "internvl": INTERNVL}


def tokenizer_for(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe's family."""
    return llava_tokenizer() if recipe.name == "llava" else internvl_tokenizer()


def llava_config(sizes: Sizes, tokenizer: PreTrainedTokenizerBase) -> LlavaConfig:
    """CLIP tower, Llama language model."""
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": sizes.tower_width,
        "intermediate_size": 2 * sizes.tower_width,
        "num_hidden_layers": sizes.tower_layers,
        "num_attention_heads": sizes.tower_heads,
        "image_size": sizes.view,
        "patch_size": sizes.patch,
        "projection_dim": sizes.tower_width,
    }
    return LlavaConfig(
        vision_config=vision,
        text_config={"model_type": "llama", **_text_config(sizes, tokenizer), "bos_token_id": tokenizer.bos_token_id},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),  # pyright: ignore[reportArgumentType]  # one id for one token
        image_seq_length=sizes.grid**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def internvl_config(sizes: Sizes, tokenizer: PreTrainedTokenizerBase) -> InternVLConfig:
    """InternViT tower with pixel shuffle 0.5, Qwen3 language model."""
    vision = {
        "hidden_size": sizes.tower_width,
        "intermediate_size": 2 * sizes.tower_width,
        "num_hidden_layers": sizes.tower_layers,
        "num_attention_heads": sizes.tower_heads,
        "attention_bias": True,
        "image_size": [sizes.view, sizes.view],
        "patch_size": [sizes.patch, sizes.patch],
        "layer_scale_init_value": 0.5,
    }
    return InternVLConfig(
        vision_config=vision,
        text_config={"model_type": "qwen3", **_text_config(sizes, tokenizer), "use_sliding_window": False},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),  # pyright: ignore[reportArgumentType]  # one id for one token
        image_seq_length=sizes.grid**2,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def _text_config(sizes: Sizes, tokenizer: PreTrainedTokenizerBase) -> dict:
    return {
        "hidden_size": sizes.width,
        "intermediate_size": 2 * sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "head_dim": sizes.width // sizes.heads,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
