"""The words both shipped models know, and their tokenizers."""

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sightlens.stimuli.questions import PLURALS
from sightlens.stimuli.shapes import COLOURS, SHAPES, SIDES

COORDINATES = 65
WORDS = (
    *COLOURS,
    *SHAPES,
    *(PLURALS[shape] for shape in SHAPES),
    *SIDES,
    *["is", "there", "a", "an", "where", "the", "how", "many", "object", "objects", "yes", "no"],
    *["are", "in", "of", "and", "left", "right", "top", "bottom", "what", "colour", "shape", "count", "number", "image", "picture"],
    *["USER", "ASSISTANT", "user", "assistant", "system"],
    *["?", ".", ",", ":"],
    *(str(digit) for digit in range(10)),
)
MARKS = tuple(f"<loc{mark:02d}>" for mark in range(COORDINATES))
LLAVA_SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>", "<image>")
INTERNVL_SPECIALS = ("<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% else %} ASSISTANT: {% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<IMG_CONTEXT>\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def coordinate(value: float) -> str:
    """The token of a coordinate between 0 and 1: the nearest of 65 marks, 0/64 to 64/64."""
    return MARKS[min(max(round(value * (COORDINATES - 1)), 0), COORDINATES - 1)]


def word_level(specials: Sequence[str], words: Sequence[str], *, whole: Sequence[str] = (), bos: str | None = None) -> Tokenizer:
    """Tokenizer with one token per word or run of punctuation.

    Args:
        specials: control tokens, first in the vocabulary; among them `<unk>`.
        words: what else is known.
        whole: tokens, last in the vocabulary, that are never split although they hold punctuation.
        bos: the special token put first, if any.
    """
    core = Tokenizer(models.WordLevel({word: k for k, word in enumerate((*specials, *words, *whole))}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(list(specials))
    core.add_tokens(list(whole))
    if bos is not None:
        known = [(bos, core.token_to_id(bos))]
        core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=known)
    return core


def llava_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer that puts <bos> first, as Llama's does."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level(LLAVA_SPECIALS, WORDS, whole=MARKS, bos="<bos>"),
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        model_max_length=2048,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=LLAVA_TEMPLATE,
    )


def internvl_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer with InternVL's special tokens; like Qwen's it adds no token in front."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level(INTERNVL_SPECIALS, WORDS, whole=MARKS),
        eos_token="<|im_end|>",
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
            "message_start_token": "<|im_start|>",
        },
        padding_side="left",
        model_max_length=2048,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=INTERNVL_TEMPLATE,
    )
