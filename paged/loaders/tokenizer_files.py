"""Tokenizers from tokenizer.json and from the `tokenizer.ggml.*` keys of GGUF metadata."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from paged.errors import LoadError
from paged.loaders.pretokenizers import pre_tokenizer
from paged.loaders.tokenizer import Tokenizer

# Token types of GGUF.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Control tokens that end a turn or a text, whatever the file calls its end token.
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>")


def tokenizer_from_folder(folder: Path, settings: Mapping[str, Any], eos_ids: Iterable[int]) -> Tokenizer | None:
    """From tokenizer.json of a Hugging Face folder; None if there is none.

    `settings` are those of tokenizer_config.json; `eos_ids`, of config.json and generation_config.json, come
    before the end token that `settings` names. A BOS is put first where `add_bos_token` says so, else where the
    post-processor of tokenizer.json does.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    with _expected(f"{path}: expected a tokenizer that the tokenizers package reads"):
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    _add_missing(backend, settings.get("added_tokens_decoder"), path.with_name("tokenizer_config.json"))
    decoders = _decoder_parts(backend)
    alphabet = _byte_alphabet() if "ByteLevel" in decoders else None
    if alphabet is None and not {"ByteFallback", "Metaspace"} & set(decoders):
        raise LoadError(
            f"{path}: expected a byte-level BPE or a SentencePiece BPE with byte fallback, "
            f"found the decoder {', '.join(decoders) or 'none'}"
        )
    bos_id = _named_token(backend, settings, "bos_token", path)
    eos_id = _named_token(backend, settings, "eos_token", path)
    added = backend.get_added_tokens_decoder()
    special = {token: entry.content for token, entry in added.items() if entry.special}
    vocab = {token: text for text, token in backend.get_vocab(with_added_tokens=False).items()}
    pieces = {token: _piece_bytes(text, alphabet) for token, text in vocab.items()}
    pieces.update({token: entry.content.encode() for token, entry in added.items()})
    first = backend.encode("", add_special_tokens=True).ids[:1]
    if bos_id is None and first and first[0] in special and first[0] != eos_id:
        bos_id = first[0]
    return Tokenizer(
        backend,
        pieces,
        special,
        bos_id=bos_id,
        eos_ids=[*eos_ids, *([] if eos_id is None else [eos_id])],
        add_bos=bool(settings.get("add_bos_token", first == [bos_id])),
        strip_space="Strip" in decoders or decoders.get("Metaspace", {}).get("prepend_scheme", "never") != "never",
        source=str(path),
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """From GGUF metadata; None if it holds no tokenizer.

    Models: "gpt2" (byte-level BPE, cut as `tokenizer.ggml.pre` says) and "llama" (SentencePiece BPE with byte
    fallback). Every control token that is known to end a turn is among `eos_ids`.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise LoadError(f"{source}: tokenizer.ggml.model must be gpt2 or llama, found {model!r}")
    tokens = _list(metadata, "tokens", str, source)
    types = _list(metadata, "token_type", int, source, default=[_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise LoadError(f"{source}: expected {len(tokens)} entries in tokenizer.ggml.token_type, found {len(types)}")
    spaces = bool(metadata.get("tokenizer.ggml.add_space_prefix", True)) and model == "llama"
    if model == "gpt2":
        cut = pre_tokenizer(metadata.get("tokenizer.ggml.pre") or "default", source)
        backend = tokenizers.Tokenizer(_bpe(tokens, metadata, source, ignore_merges=cut.ignore_merges))
        backend.pre_tokenizer = cut.build()
        backend.normalizer = cut.normalizer()  # type: ignore[assignment]
        adds_bos, alphabet = cut.add_bos, _byte_alphabet()
    else:
        unknown = _id(metadata, "unknown_token_id", len(tokens), source)
        text = tokens[0 if unknown is None else unknown]
        backend = tokenizers.Tokenizer(
            _bpe(tokens, metadata, source, unk_token=text, fuse_unk=True, byte_fallback=True)
        )
        steps = [normalizers.Prepend("\u2581")] if spaces else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])  # type: ignore[assignment]
        adds_bos, alphabet = True, None
    special = {i: text for i, text in enumerate(tokens) if types[i] in (_UNKNOWN, _CONTROL)}
    literal = {i: text for i, text in enumerate(tokens) if types[i] == _USER_DEFINED}
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special.values() if t])
    backend.add_tokens([AddedToken(t, normalized=False) for t in literal.values() if t])
    pieces = {i: _piece_bytes(text, alphabet) for i, text in enumerate(tokens)}
    pieces.update({i: text.encode() for i, text in literal.items()})
    ends = [_id(metadata, name, len(tokens), source) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends += [i for i, text in special.items() if text in _END_TEXTS]
    return Tokenizer(
        backend,
        pieces,
        special,
        bos_id=_id(metadata, "bos_token_id", len(tokens), source),
        eos_ids=[token for token in ends if token is not None],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        strip_space=spaces,
        source=source,
    )


def _bpe(tokens: list[str], metadata: Mapping[str, Any], source: str, **options: Any) -> models.BPE:
    vocab = {text: i for i, text in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata or "byte_fallback" not in options:
        merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str, source)]
        short = next(("".join(merge) for merge in merges if len(merge) < 2), None)
        if short is not None:
            raise LoadError(f"{source}: expected two tokens in each of tokenizer.ggml.merges, found {short!r}")
    else:
        merges = _merges_of_scores(vocab, _list(metadata, "scores", float, source), source)
    with _expected(f"{source}: expected merges of two tokens of the vocabulary"):
        return models.BPE(vocab, merges, **options)  # type: ignore[arg-type]


@contextmanager
def _expected(what: str) -> Iterator[None]:
    """LoadError for what the tokenizers package raises: bare Exceptions, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise LoadError(f"{what}, found: {str(error).partition(chr(10))[0]}") from None


def _merges_of_scores(vocab: Mapping[str, int], scores: list[float], source: str) -> list[tuple[str, str]]:
    """Merges that make the choices of SentencePiece's BPE, which joins the pair of the best scored piece first."""
    if len(scores) != len(vocab):
        raise LoadError(f"{source}: expected {len(vocab)} entries in tokenizer.ggml.scores, found {len(scores)}")
    pairs = []
    for piece, token in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[token], token, left, right, piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(pairs)]


def _decoder_parts(backend: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    """Type -> settings of each part of the decoder that a tokenizer.json gives."""
    if backend.decoder is None:
        return {}
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"]: part for part in state.get("decoders", [state])}


def _named_token(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str, path: Path) -> int | None:
    """Id of the token that tokenizer_config.json names, as text or as an object with `content`.

    It is a control token from then on, if tokenizer.json has it as an ordinary one.
    """
    text = settings.get(name)
    if isinstance(text, Mapping):
        text = text.get("content")
    if text is None:
        return None
    try:
        token = backend.token_to_id(str(text))
    except UnicodeEncodeError:  # JSON may spell half of a pair of surrogates, which no vocabulary has
        token = None
    if token is None:
        warnings.warn(f"{path}: the {name} {text!r} of tokenizer_config.json is not in the vocabulary", stacklevel=4)
    elif not ((known := backend.get_added_tokens_decoder().get(token)) and known.special):
        backend.add_special_tokens([AddedToken(str(text), normalized=False)])
    return token


def _add_missing(backend: tokenizers.Tokenizer, entries: Any, where: Path) -> None:
    """Add the tokens that tokenizer_config.json names by id and tokenizer.json does not, as transformers does."""
    if not isinstance(entries, Mapping):
        return
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for index, entry in sorted(entries.items(), key=lambda item: (len(item[0]), item[0])):  # by number
        text = entry.get("content") if isinstance(entry, Mapping) else entry
        if not isinstance(entry, Mapping) or not isinstance(text, str) or not text:
            raise LoadError(f"{where}: expected an object with a content in added_tokens_decoder, found {entry!r:.80}")
        if text in known:
            continue
        with _expected(f"{where}: expected tokens in added_tokens_decoder"):
            backend.add_tokens([AddedToken(text, **{name: bool(entry[name]) for name in flags if name in entry})])
            found = backend.token_to_id(text)
        if str(found) != index:
            warnings.warn(f"{where}: {text!r} should have id {index}; tokenizer.json leaves it {found}", stacklevel=4)


def _list(
    metadata: Mapping[str, Any], name: str, kind: type, source: str, default: list[Any] | None = None
) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise LoadError(
            f"{source}: expected a list of {kind.__name__} for tokenizer.ggml.{name}, found {type(values).__name__}"
        )
    return values


def _id(metadata: Mapping[str, Any], name: str, size: int, source: str) -> int | None:
    token = metadata.get(f"tokenizer.ggml.{name}")
    if token is not None and not (type(token) is int and 0 <= token < size):  # true is no id
        raise LoadError(f"{source}: expected an id below {size} for tokenizer.ggml.{name}, found {token!r}")
    return token


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of the alphabet in which byte-level BPE spells bytes.

    Bytes that print stand for themselves; the others, in order, are the code points from 256 on (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{256 + i: byte for i, byte in enumerate(others)}}


def _piece_bytes(token: str, alphabet: Mapping[int, int] | None) -> bytes:
    """Bytes of a token: spelled in the byte alphabet, or, where there is none, <0xNN> or text with U+2581 for spaces.

    A byte-level token with characters outside the alphabet is literal text.
    """
    if alphabet is not None:
        try:
            return bytes([alphabet[ord(char)] for char in token])
        except KeyError:
            return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
