"""A small byte-level BPE tokenizer with the release's special tokens, made from the text below.

The text never changes, so the same vocabulary size gives the same tokenizer everywhere. Imports no torch.

Source: sections 3.4 and 3.5 of the model's fact sheet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

BOS_TOKEN = "<｜begin▁of▁sentence｜>"
EOS_TOKEN = "<｜end▁of▁sentence｜>"
PAD_TOKEN = "<｜▁pad▁｜>"
IMAGE_TOKEN = "<｜deepseek_image｜>"
NOISE_TOKEN = "<｜noise｜>"

# Ids from 0 on, in this order. BOS, EOS and PAD have the release's ids.
LOW_TOKENS = (
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<tool_result>",
    "</tool_result>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
# Parts of a message rather than marks between messages: a reply shows them.
_VISIBLE = {"<think>", "</think>", "｜DSML｜", "<tool_result>", "</tool_result>"}

_NUM_BYTES = 256
SMALLEST_VOCABULARY = len(LOW_TOKENS) + _NUM_BYTES + 2

_TEXT = """
The river begins under the old bridge and runs past the mill, the school and the market. Every morning the
miller opens the gate a little, listens to the water, and writes down how high it stands. He has done this
for thirty years. His books fill a shelf, and nobody but the teacher has ever read them from the first
page to the last.

What did the teacher find? That the water stands highest in the week after the snow has gone, that it
falls through the summer, and that the fish come back when the leaves turn red. She told the children, and
the children made a large map of the valley with a blue line for the river and a small house for each of
their own. Where do the ducks sleep? Why is the bridge made of stone? How far away is the sea, and who has
seen it? They asked everyone they met.

One of them, a girl with a green coat, wanted to know the number of steps between the mill and the sea. So
she walked along the bank one Saturday, counting: one, two, three, ten, twenty, a hundred, a thousand, ten
thousand. When it became dark she had counted 12,345 steps, and her mother, who had followed her the whole
way without being seen, carried her home on her shoulders. "Tomorrow," said the girl, "I will begin again,
but from the other end."

A computer counts faster than a girl in a green coat, but it has to be told what a step is. First we write a
function; then we test it; then we measure how long it takes and how much memory it needs:

    def count_steps(path, length=0.5):
        total = 0
        for start, end in zip(path, path[1:]):
            total += distance(start, end) / length
        return int(total)

    class River:
        def __init__(self, name, gauges):
            self.name = name
            self.gauges = sorted(gauges, key=lambda gauge: gauge.position)

        def level(self, day):
            return {gauge.name: gauge.read(day) for gauge in self.gauges if gauge.is_open}

Models of language work with tokens. A token is a piece of text: a letter, part of a word, a word, a
number. The model reads the tokens of a prompt, keeps keys and values for each of them, and says which
token is likely to come next. Attention looks back over the window; memory of short phrases comes from a
table; experts take turns. Answer the question in one sentence. Explain your reasoning step by step. Write
a short story about a dragon who is afraid of the dark. Translate the following text into French, German
and Chinese. What is the capital of France? The capital of France is Paris. Please summarize this article
for me, and keep the names of people and places.

La rivière commence sous le vieux pont. Où dorment les canards, et pourquoi le pont est-il en pierre ?
Der Fluss beginnt unter der alten Brücke. Wie weit ist es bis zum Meer, und wer hat es schon gesehen?
河流从老桥下流过，经过磨坊、学校和市场。孩子们问：大海有多远？谁见过大海？
{"name": "mill", "level": 1.75, "open": true, "gauges": [1, 2, 3], "note": null, "url": "https://example.org/a?b=c"}
| day | level | change |
| --- | ----- | ------ |
| Monday | 0.12 | +3 % |
| Tuesday | 4.56 | -7 % |
Thank you very much! You're welcome; it's nothing. I don't know what we'll do, but they've never been wrong.
"""


def build_tokenizer(
    vocab_size: int, image_token_id: int, noise_token_id: int, texts: Iterable[str] | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer in which every id below ``vocab_size`` is a token.

    Ids that the text is too short for are placeholders, which no text encodes to.

    Args:
        vocab_size: Number of ids, at least :data:`SMALLEST_VOCABULARY`.
        image_token_id: Id of the image placeholder.
        noise_token_id: Id of the token that fills a draft block.
        texts: What to learn pieces from; the text above if None.

    Raises:
        ValueError: The ids do not fit in the vocabulary, or collide.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    high = {image_token_id: IMAGE_TOKEN, noise_token_id: NOISE_TOKEN}
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level vocabulary needs at least {SMALLEST_VOCABULARY}"
        )
    if len(high) < 2 or not all(len(LOW_TOKENS) <= token_id < vocab_size for token_id in high):
        raise ValueError(
            f"image_token_id {image_token_id} and dspark_noise_token_id {noise_token_id} must be two ids "
            f"from {len(LOW_TOKENS)} to {vocab_size - 1}"
        )
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LOW_TOKENS) - len(high),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(_TEXT.split("\n\n") if texts is None else texts, trainer)
    model: dict[str, Any] = json.loads(learned.to_str())["model"]
    pieces = iter(sorted(model["vocab"], key=model["vocab"].__getitem__))

    vocabulary = {token: token_id for token_id, token in enumerate(LOW_TOKENS)}
    for token_id in range(len(LOW_TOKENS), vocab_size):
        token = high.get(token_id) or next(pieces, f"<｜place▁holder▁no▁{token_id}｜>")
        vocabulary[token] = token_id
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in model["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A $B",
        special_tokens=[(BOS_TOKEN, vocabulary[BOS_TOKEN])],
    )
    for token in (*LOW_TOKENS, *high.values()):
        tokenizer.add_tokens([AddedToken(token, special=token not in _VISIBLE, normalized=False)])
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS_TOKEN,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS_TOKEN,
        "model_max_length": max_length,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )
