"""Ask a shipped checkpoint questions with plain `transformers`: the one place that generates, so that it can be swapped."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

LONGEST_ANSWER = 5


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded folder: model, tokenizer and image processor."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pixels: LlavaImageProcessorPil | GotOcr2ImageProcessorPil

    @property
    def family(self) -> str:
        """The model type: "llava" or "internvl"."""
        return self.model.config.model_type

    @property
    def view_tokens(self) -> int:
        """Visual tokens of one view."""
        return self.model.config.image_seq_length


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load a folder written by `export` in evaluation mode."""
    family = AutoConfig.from_pretrained(folder).model_type
    processor = LlavaImageProcessorPil if family == "llava" else GotOcr2ImageProcessorPil
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return Checkpoint(model, AutoTokenizer.from_pretrained(folder), processor.from_pretrained(folder))


def prompt_text(checkpoint: Checkpoint, question: str, views: int) -> str:
    """The prompt of one question, its image placeholder already repeated for every visual token."""
    tokens = views * checkpoint.view_tokens
    if checkpoint.family == "llava":
        return f"USER: {'<image>' * tokens}\n{question} ASSISTANT:"
    return f"<|im_start|>user\n<img>{'<IMG_CONTEXT>' * tokens}</img>\n{question}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def generate(checkpoint: Checkpoint, images: list[Image.Image], questions: list[str]) -> list[str]:
    """Greedy answers, special tokens removed, to question k about image k, all in one left-padded batch."""
    seen = [checkpoint.pixels(images=[image], return_tensors="pt")["pixel_values"] for image in images]
    text = [prompt_text(checkpoint, question, len(views)) for question, views in zip(questions, seen, strict=True)]
    inputs = checkpoint.tokenizer(text, return_tensors="pt", padding=True)
    output = checkpoint.model.generate(  # pyright: ignore[reportCallIssue]  # not every PreTrainedModel has it
        **inputs, pixel_values=torch.cat(seen), do_sample=False, max_new_tokens=LONGEST_ANSWER
    )
    return checkpoint.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
