"""How GGUF's `tokenizer.ggml.pre` cuts text into words before the merges of a byte-level BPE apply.

The patterns are those of the tokenizers that the names stand for, as their tokenizer.json files and llama.cpp's
src/llama-vocab.cpp spell them. A step is applied to each piece that the step before left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from paged.errors import LoadError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text: `steps` of patterns; whole words found in the vocabulary skip the merges if
    `ignore_merges`; a BOS is put first if `add_bos`, where the file does not say; `nfc` composes accents first."""

    steps: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(step), behavior="isolated") for step in self.steps]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_KINDS = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
    PreTokenizer((_GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling",
    PreTokenizer((r"\p{N}", _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe",
    PreTokenizer((_QWEN2,), nfc=True): "qwen2 deepseek-r1-qwen megrez kormo",
    PreTokenizer((_QWEN2,)): "stablelm2",
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
}
PRE_TOKENIZERS = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """The cut that `tokenizer.ggml.pre` names; LoadError lists the known names."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:  # a damaged file may hold anything
        raise LoadError(
            f"{source}: tokenizer.ggml.pre must be one of {', '.join(sorted(PRE_TOKENIZERS))}, found {name!r}"
        )
    return PRE_TOKENIZERS[name]
