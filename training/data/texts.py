"""Texts for language models: documents, their concatenated tokens, and blocks of these.

Documents are tokenised, each is followed by the end-of-text token, and their concatenation is cut into blocks of equal
length, across document borders ("wrapped" packing). An incomplete last block is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.reading.files import is_hidden, unread_files
from training.common.arguments import LimitArguments, flag
from training.common.folders import require_files, require_folder
from training.common.messages import abbreviate
from training.data.augmentation import IGNORED_LABEL, PADDING
from training.data.sources import DataRequest, report_unread
from training.data.tables import FILE_BUILDERS, load_table_files, pick_splits, translate_read_errors


logger = logging.get_logger(__name__)
END_OF_TEXT = "<|endoftext|>"
# Number of documents that are tokenised together.
BATCH = 100
# With fewer documents, intervals resample blocks, because few documents do not show how documents vary.
FEWEST_DOCUMENTS = 20


@dataclass
class TextDataArguments(LimitArguments):
    """Sources of texts. Examples are blocks of `max_length` tokens."""

    dataset_name: str | None = flag(None, "A data set of texts on the Hub.")
    dataset_config_name: str | None = flag(None, "Configuration of the data set.")
    text_folder: str | None = flag(
        None, "Folder of texts, one document per file, or with folders train/ and validation/ of these."
    )
    text_patterns: list[str] = flag(["**/*.txt"], "Patterns of the files in --text_folder to read, such as **/*.py.")
    train_files: list[str] | None = flag(
        None, "Parquet, json or csv files with a column of texts, or one file per text, to train on."
    )
    validation_files: list[str] | None = flag(None, "Such files to evaluate.")
    train_split: str = flag("train", "Split to train on.")
    eval_split: str | None = flag(None, "Split to evaluate; by default the first of validation, valid, dev and test.")
    validation_fraction: float | None = flag(
        None,
        "Share of the training split's documents to hold out if there is no other split. They are the same for every "
        "seed, so that a model that is trained further is not evaluated on its training data.",
    )
    dataset_text_field: str | None = flag(None, "Column of texts; by default `text`, else the only column of texts.")
    max_length: int = flag(1024, "Tokens in a block.")
    evaluation_lengths: list[int] | None = flag(
        None, "Block lengths for the final evaluation, in addition to max_length."
    )

    def __post_init__(self):
        super().__post_init__()
        if min(self.lengths) < 2:
            raise InputError(
                f"--max_length {self.max_length} --evaluation_lengths {self.evaluation_lengths}; accepted: 2 and above."
            )

    def require_origin(self) -> None:
        """Raises [`InputError`] unless exactly one source of texts is given."""
        origins = {
            "--dataset_name": self.dataset_name,
            "--text_folder": self.text_folder,
            "--train_files and --validation_files": self.train_files or self.validation_files,
        }
        given = [name for name, value in origins.items() if value]
        if len(given) != 1:
            raise InputError(f"{' and '.join(given) or 'No data'} given; accepted: one of {', '.join(origins)}.")

    @property
    def lengths(self) -> list[int]:
        """Block lengths for the evaluation, the training length first."""
        return [self.max_length, *sorted(set(self.evaluation_lengths or []) - {self.max_length})]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with 256 byte tokens and an end-of-text token."""
    tokens = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


@dataclass
class TokenStream:
    """The concatenated tokens of all documents (N,), and the document number of each token (N,)."""

    tokens: np.ndarray
    documents: np.ndarray

    def cut(self, length: int) -> np.ndarray:
        """Blocks of `length` tokens, (blocks, length)."""
        count = len(self.tokens) // length
        return self.tokens[: count * length].reshape(count, length)

    @property
    def resamples_documents(self) -> bool:
        return len(np.unique(self.documents)) >= FEWEST_DOCUMENTS

    def units(self, length: int, longest: int) -> np.ndarray:
        """
        The resampling unit of every predicted token, (blocks, length): its document or, if documents are few, a stretch
        of `longest` tokens.
        """
        units = self.documents if self.resamples_documents else np.arange(len(self.tokens)) // longest
        count = len(units) // length
        # Position i predicts token i + 1; the last position of a block has no label.
        return np.roll(units[: count * length].reshape(count, length), -1, axis=1)


class TokenBlocks(Dataset):
    """Blocks (blocks, length) by index or training key `(epoch, index)`: `tokens` and `is_padding`."""

    def __init__(self, blocks: np.ndarray):
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        index = key[1] if isinstance(key, tuple) else key
        return {"tokens": self.blocks[max(index, 0)], "is_padding": index == PADDING}


def collate_blocks(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` (B, N). The label of a token is the next token, of the last `IGNORED_LABEL`."""
    tokens = torch.from_numpy(np.stack([example["tokens"] for example in examples]).astype(np.int64))
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels[:, :-1] = tokens[:, 1:]
    labels[torch.tensor([example["is_padding"] for example in examples])] = IGNORED_LABEL
    return {"input_ids": tokens, "labels": labels}


@dataclass
class TextData:
    train: TokenBlocks | None
    evaluation: TokenStream | None
    splits: dict[str, str]


def load_texts(
    arguments: TextDataArguments, tokenizer: PreTrainedTokenizerBase, parts: tuple[str, ...], seed: int
) -> TextData:
    """
    Reads, tokenises and cuts the required parts of the data.

    Args:
        seed: Seed for the blocks that `train_fraction` draws.

    Raises:
        InputError: for data that cannot be read or are shorter than a block.
    """
    arguments.require_origin()
    tables = _load_documents(arguments)
    chosen, splits = pick_splits(tables, arguments, DataRequest((1, 1), parts=parts))
    streams = {}
    for part, table in chosen.items():
        limit, length = arguments.limits[part], arguments.max_length
        # Randomly drawn blocks need all tokens.
        enough = limit * length if limit and (part == "evaluation" or arguments.train_fraction == 1) else None
        streams[part] = _tokenize(table, _text_column(table.features, arguments), tokenizer, enough)
        longest = max(arguments.lengths) if part == "evaluation" else length
        if len(streams[part].tokens) < longest:
            raise InputError(
                f"The {part} data have {len(streams[part].tokens)} tokens, fewer than a block of {longest}; accepted: "
                "more texts or a shorter --max_length and --evaluation_lengths."
            )
    if "evaluation" in streams and not streams["evaluation"].resamples_documents:
        logger.warning(
            f"Fewer than {FEWEST_DOCUMENTS} documents are evaluated: intervals resample stretches of "
            f"{max(arguments.lengths)} tokens, not documents."
        )
    train = None
    if "training" in streams:
        blocks = streams["training"].cut(arguments.max_length)
        if arguments.train_fraction < 1:
            count = max(round(len(blocks) * arguments.train_fraction), 1)
            blocks = blocks[np.sort(np.random.default_rng(seed).permutation(len(blocks))[:count])]
        train = TokenBlocks(blocks[: arguments.max_train_samples])
    return TextData(train, streams.get("evaluation"), splits)


def _load_documents(arguments: TextDataArguments) -> datasets.DatasetDict:
    if arguments.dataset_name:
        with translate_read_errors(f"--dataset_name {arguments.dataset_name!r}"):
            return datasets.load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    if arguments.text_folder:
        return _folder_documents(Path(arguments.text_folder), arguments.text_patterns)
    files = {"train": arguments.train_files or [], "validation": arguments.validation_files or []}
    if all(Path(name).suffix in FILE_BUILDERS for names in files.values() for name in names):
        return load_table_files(files)
    documents = {split: [_read_text(name) for name in names] for split, names in files.items() if names}
    return _to_tables(documents)


def _folder_documents(folder: Path, patterns: list[str]) -> datasets.DatasetDict:
    require_folder("text_folder", str(folder))
    parts = {"train": folder / "train", "validation": folder / "validation"}
    if not all(part.is_dir() for part in parts.values()):
        parts = {"train": folder}
    documents, unreadable, matching = {}, [], {file for part in parts.values() for file in _find_files(part, patterns)}
    for split, part in parts.items():
        texts = []
        for path in _find_files(part, patterns):
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                unreadable.append(path.name)
        if not texts:
            raise InputError(f"{str(part)!r} has no UTF-8 files that match --text_patterns {' '.join(patterns)}.")
        documents[split] = texts
    if unreadable:
        logger.warning(f"{len(unreadable)} files are not UTF-8 and are ignored: {abbreviate(unreadable)}.")
    report_unread(f"--text_folder {str(folder)!r}", unread_files(folder, matching), matching)
    return _to_tables(documents)


def _find_files(folder: Path, patterns: list[str]) -> list[Path]:
    """Files of a folder that match one of the patterns."""
    found = set()
    for pattern in patterns:
        try:
            found |= {path for path in folder.glob(pattern) if path.is_file() and not is_hidden(path, folder)}
        except (NotImplementedError, ValueError) as error:
            raise InputError(
                f"--text_patterns {pattern!r}: {error}; accepted: patterns in the folder, such as **/*.py."
            ) from error
    return sorted(found)


def _read_text(name: str) -> str:
    require_files([name])
    if Path(name).suffix in FILE_BUILDERS:
        raise InputError(f"{name!r} is a table and other files are texts; accepted: files of one kind.")
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name!r} cannot be read as UTF-8 text ({error}).") from error


def _to_tables(documents: dict[str, list[str]]) -> datasets.DatasetDict:
    return datasets.DatasetDict(
        {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in documents.items()}
    )


def _text_column(features: datasets.Features, arguments: TextDataArguments) -> str:
    texts = [
        name for name, feature in features.items() if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    given = arguments.dataset_text_field
    if given is not None and given not in texts:
        raise InputError(f"--dataset_text_field {given!r}; columns with texts: {', '.join(texts) or 'none'}.")
    if given is None and "text" not in texts and len(texts) != 1:
        raise InputError(
            f"The data have {len(texts)} columns with texts among {', '.join(features)}; accepted: "
            "--dataset_text_field with one of them."
        )
    return given or ("text" if "text" in texts else texts[0])


def _tokenize(
    table: datasets.Dataset, column: str, tokenizer: PreTrainedTokenizerBase, enough: int | None
) -> TokenStream:
    """The tokens of all documents, or of the first documents with `enough` tokens."""
    tokens, lengths, total = [], [], 0
    for texts in _batches(table, column):
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        for document in encoded:
            tokens.append(np.array([*document, *end], np.int32))
            lengths.append(len(tokens[-1]))
            total += lengths[-1]
        if enough is not None and total >= enough:
            break
    if not tokens:
        return TokenStream(np.empty(0, np.int32), np.empty(0, np.int32))
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return TokenStream(np.concatenate(tokens)[:enough], documents[:enough])


def _batches(table: datasets.Dataset, column: str) -> Iterator[list[str]]:
    """Batches of non-empty texts."""
    for rows in table.select_columns([column]).iter(BATCH):
        if texts := [text for text in rows[column] if text]:
            yield texts
