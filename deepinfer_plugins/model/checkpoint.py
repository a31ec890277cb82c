"""Reads a checkpoint in the release format: checks all of it first, then reads tensors by byte range.

Opening reads the index and the headers of the shards, a few MB even for the release. Nothing is mapped into
memory: files are read with plain I/O straight into the tensors that keep the values.

Source: sections 3.1 to 3.3 of the model's fact sheet.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.tensors import DTYPE_BYTES, TensorSpec, expected_tensors

INDEX_NAME = "model.safetensors.index.json"
_MODEL_PREFIX = "model."
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_SHOWN = 20
# Bytes on their way to another device or type pass through host memory in pieces of this size.
_STAGE_BYTES = 64 * 2**20
# UE8M0 for 1.
_UNIT_SCALE = 127
# Engram rows are padded so that every rank has whole groups of this many.
_ENGRAM_ROW_GROUP = 256

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}

_EXPERT = re.compile(r"\.ffn\.experts\.(\d+)\.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. ``problems`` has all; the message shows the first twenty."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{folder} is not a checkpoint we can load: {count}", *problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            lines.append(f"... and {len(problems) - _MAX_SHOWN} more")
        super().__init__("\n  ".join(lines))


@dataclass(frozen=True, slots=True)
class Placement:
    """Which routed experts and Engram rows a rank holds; everything else is on every rank."""

    ep_rank: int = 0
    ep_size: int = 1
    engram_rank: int = 0
    engram_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("ep", "engram"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise ValueError(
                    f"{kind}_rank is {rank} of {kind}_size {size}; it must be from 0 to {size - 1}"
                )

    def experts(self, num_experts: int) -> range:
        """The contiguous expert slots of this rank.

        Raises:
            ValueError: The experts do not divide evenly over the ranks.
        """
        if num_experts % self.ep_size:
            raise ValueError(
                f"{num_experts} experts do not divide evenly over {self.ep_size} expert-parallel ranks"
            )
        count = num_experts // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)

    def engram_rows(self, num_rows: int) -> range:
        """The rows of this rank in a table padded for even shares; those from ``num_rows`` on are padding."""
        share = self._padded(num_rows) // self.engram_size
        return range(self.engram_rank * share, (self.engram_rank + 1) * share)

    def _padded(self, num_rows: int) -> int:
        if self.engram_size == 1:
            return num_rows
        unit = math.lcm(_ENGRAM_ROW_GROUP, self.engram_size)
        return -(-num_rows // unit) * unit


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as a shard's header describes it; ``start`` and ``end`` are offsets in the file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """The tensors of a checkpoint whose index and headers were found to be in order."""

    def __init__(self, folder: Path, config: ModelConfig, entries: Mapping[str, _Entry]) -> None:
        self.folder = folder
        self.config = config
        self._entries = entries

    @classmethod
    def open(cls, folder: str | Path, config: ModelConfig | None = None) -> Checkpoint:
        """Check every name, shape, dtype and file of a checkpoint. No tensor data is read.

        Args:
            folder: Has ``config.json``, shards and their index; or one ``.safetensors`` file and no index.
            config: What the tensors must fit; the folder's own by default.

        Raises:
            ConfigError: ``config.json`` cannot be used.
            CheckpointError: Lists everything that is wrong with the tensors.
        """
        folder = Path(folder)
        config = ModelConfig.from_folder(folder) if config is None else config
        return cls(folder, config, _Inspection(folder).entries(expected_tensors(config)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, without the ``model.`` that a file may put in front."""
        return tuple(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype as stored."""
        entry = self._entry(name)
        return TensorSpec(entry.shape, entry.dtype)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU. UE8M0 scales and packed e2m1 come as ``uint8``."""
        entry = self._entry(name)
        return self.read_rows(name, 0, entry.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (exclusive) of the first dimension, on the CPU.

        Raises:
            IndexError: The tensor has no such rows.
        """
        entry = self._entry(name)
        if not 0 <= start <= stop <= entry.shape[0]:
            raise IndexError(f"rows {start} to {stop} of {name}, which has {entry.shape[0]}")
        out = torch.empty((stop - start, *entry.shape[1:]), dtype=_TORCH_DTYPES[entry.dtype])
        self.load([(name, out, start)])
        return out

    def read_engram(self, layer: int, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's share of an Engram table, padding rows included.

        Returns:
            Values ``[rows, head_dim]`` e4m3 and scales ``[rows, head_dim / 32]`` uint8; padding is zero with
            scale 1.
        """
        prefix = f"layers.{layer}.engram.embed"
        rows = placement.engram_rows(self._entry(f"{prefix}.weight").shape[0])
        pair = []
        for name in (f"{prefix}.weight", f"{prefix}.scale"):
            entry = self._entry(name)
            pair.append(torch.empty((len(rows), *entry.shape[1:]), dtype=_TORCH_DTYPES[entry.dtype]))
            self.load([(name, pair[-1], rows.start)])
        return pair[0], pair[1]

    def wanted(self, placement: Placement) -> list[str]:
        """Names of the tensors a rank reads at least some of."""
        shares = {
            "layers": placement.experts(self.config.n_routed_experts),
            "mtp": placement.experts(self.config.dspark_n_routed_experts),
        }
        return [
            name
            for name in self._entries
            if (match := _EXPERT.search(name)) is None or int(match[1]) in shares[name.partition(".")[0]]
        ]

    def stream(
        self, placement: Placement | None = None, names: Iterable[str] | None = None, progress: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors one after another in the order of the files, each in host memory of its own.

        Args:
            placement: Whose share; all of it by default. Engram tables come as that rank's rows.
            names: Only these.
            progress: Show a bar over the bytes.
        """
        placement = Placement() if placement is None else placement
        chosen = self.wanted(placement)
        if names is not None:
            only = set(names)
            chosen = [name for name in chosen if name in only]
        requests = []
        for name in chosen:
            entry = self._entry(name)
            rows = (
                placement.engram_rows(entry.shape[0]) if ".engram.embed." in name else range(entry.shape[0])
            )
            requests.append((name, rows))
        with self._reading((name for name, _ in requests), progress) as read:
            for name, rows in sorted(requests, key=lambda request: self._position(request[0])):
                entry = self._entry(name)
                out = torch.empty((len(rows), *entry.shape[1:]), dtype=_TORCH_DTYPES[entry.dtype])
                read(name, out, rows.start)
                yield name, out

    def load(self, requests: Iterable[tuple[str, torch.Tensor, int]], progress: bool = False) -> None:
        """Read straight into tensors, in the order of the files.

        A contiguous tensor on the CPU, of the stored dtype, is read into without a copy. Others are filled
        through a small buffer, and rounded if their dtype is another.

        Args:
            requests: Name, tensor to fill, and the first row to read. Rows past the end of the stored tensor
                are filled with zeros, or with 1 if it holds scales: the padding of a sharded table.
            progress: Show a bar over the bytes.

        Raises:
            KeyError: There is no such tensor.
            ValueError: A tensor's row shape is not the stored one.
            CheckpointError: A file ends early; it was changed since it was opened.
        """
        listed = sorted(requests, key=lambda request: self._position(request[0]))
        with self._reading((name for name, _, _ in listed), progress) as read:
            for name, out, first_row in listed:
                read(name, out, first_row)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"{self.folder} has no tensor {name}") from None

    def _position(self, name: str) -> tuple[str, int]:
        entry = self._entry(name)
        return entry.shard, entry.start

    @contextmanager
    def _reading(
        self, names: Iterable[str], progress: bool
    ) -> Iterator[Callable[[str, torch.Tensor, int], None]]:
        """Something to read with that keeps the current file open and shows how far it is."""
        with ExitStack() as stack:
            advance: Callable[[int], None] = _ignore
            if progress:
                total = sum(entry.end - entry.start for entry in map(self._entry, names))
                advance = stack.enter_context(_progress_bar(total))
            current: list[tuple[str, io.FileIO]] = []

            def read(name: str, out: torch.Tensor, first_row: int) -> None:
                entry = self._entry(name)
                if not current or current[-1][0] != entry.shard:
                    if current:
                        current.pop()[1].close()
                    current.append((entry.shard, stack.enter_context(io.FileIO(self.folder / entry.shard))))
                self._fill(current[-1][1], name, entry, out, first_row, advance)

            yield read

    def _fill(
        self,
        file: io.FileIO,
        name: str,
        entry: _Entry,
        out: torch.Tensor,
        first_row: int,
        advance: Callable[[int], None],
    ) -> None:
        rows, *row_shape = entry.shape
        if list(out.shape[1:]) != row_shape:
            raise ValueError(
                f"{name} has rows of shape {row_shape}, but the tensor to fill has {list(out.shape[1:])}"
            )
        present = min(max(rows - first_row, 0), out.shape[0])
        row_bytes = (entry.end - entry.start) // rows
        file.seek(entry.start + first_row * row_bytes)
        dtype = _TORCH_DTYPES[entry.dtype]
        target = out[:present]
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._read_bytes(file, name, entry, target, advance)
        elif present:
            step = min(present, max(1, _STAGE_BYTES // row_bytes))
            stage = torch.empty((step, *row_shape), dtype=dtype)
            for start in range(0, present, step):
                piece = stage[: min(step, present - start)]
                self._read_bytes(file, name, entry, piece, advance)
                target[start : start + len(piece)].copy_(piece)
        if present < out.shape[0]:
            padding = out[present:]
            if entry.dtype == "F8_E8M0":
                padding.fill_(_UNIT_SCALE)
            else:
                padding.zero_()

    def _read_bytes(
        self, file: io.FileIO, name: str, entry: _Entry, out: torch.Tensor, advance: Callable[[int], None]
    ) -> None:
        view = memoryview(out.view(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            # One call reads at most 2 GiB on Linux; pieces also let the bar move.
            got = file.readinto(view[done : done + _STAGE_BYTES])
            if not got:
                problem = (
                    f"{name}: {entry.shard} ends inside it, so it changed since it was opened; copy it again"
                )
                raise CheckpointError(self.folder, [problem])
            done += got
            advance(got)


def _ignore(num_bytes: int) -> None:
    """Nobody is watching."""


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    from rich import progress

    columns = (
        progress.TextColumn("Loading weights"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class _Inspection:
    """Collects what is wrong with a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: list[str] = []

    def entries(self, expected: Mapping[str, TensorSpec]) -> dict[str, _Entry]:
        """Where each expected tensor lies.

        Raises:
            CheckpointError: Anything is wrong.
        """
        shards, index = self._shards()
        found: dict[str, _Entry] = {}
        raw_names: dict[str, str] = {}
        unreadable = set()
        for shard in shards:
            try:
                header = _read_header(self._folder, shard)
            except _BadShard as problem:
                self._problems.append(f"{shard}: {problem}")
                unreadable.add(shard)
                continue
            for raw, entry in header.items():
                name = raw.removeprefix(_MODEL_PREFIX)
                if name in found:
                    self._report_duplicate(raw, entry, raw_names[name], found[name])
                    continue
                found[name], raw_names[name] = entry, raw
        if index is not None:
            self._compare_with_index(found, index, unreadable)
        self._compare_with_config(found, expected, index or {}, unreadable)
        if self._problems:
            raise CheckpointError(self._folder, self._problems)
        return {name: found[name] for name in expected}

    def _shards(self) -> tuple[list[str], dict[str, str] | None]:
        """Names of the files, and which of them the index says each tensor is in."""
        path = self._folder / INDEX_NAME
        if not path.is_file():
            files = sorted(file.name for file in self._folder.glob("*.safetensors"))
            if len(files) == 1:
                return files, None
            found = "no .safetensors file" if not files else f"{len(files)} .safetensors files"
            self._problems.append(
                f"{INDEX_NAME}: missing, with {found} in the folder; copy the index of the release too "
                "(only a checkpoint of one file does without)"
            )
            raise CheckpointError(self._folder, self._problems)
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            if not all(isinstance(shard, str) for shard in weight_map.values()):
                raise TypeError("a file name in weight_map is not a string")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._problems.append(
                f"{INDEX_NAME}: no weight_map from names to files in it ({error!r}); copy it again"
            )
            raise CheckpointError(self._folder, self._problems) from error
        index: dict[str, str] = {}
        for raw, shard in weight_map.items():
            name = raw.removeprefix(_MODEL_PREFIX)
            if name in index:
                self._problems.append(
                    f"{name}: twice in {INDEX_NAME}, with and without {_MODEL_PREFIX!r}; remove one of them"
                )
            index[name] = shard
        shards = sorted(set(index.values()))
        for shard in shards:
            if Path(shard).name != shard:
                self._problems.append(
                    f"{INDEX_NAME}: names the file {shard!r}, which is not in the checkpoint's folder"
                )
        return [shard for shard in shards if Path(shard).name == shard], index

    def _report_duplicate(self, raw: str, entry: _Entry, other_raw: str, other: _Entry) -> None:
        where = entry.shard if entry.shard == other.shard else f"{other.shard} and {entry.shard}"
        how = f"as {other_raw} and {raw} " if raw != other_raw else ""
        self._problems.append(
            f"{raw.removeprefix(_MODEL_PREFIX)}: there twice, {how}in {where}; remove one of them"
        )

    def _compare_with_index(
        self, found: Mapping[str, _Entry], index: Mapping[str, str], unreadable: set[str]
    ) -> None:
        for name, shard in index.items():
            if shard in unreadable:
                continue
            if name not in found:
                self._problems.append(
                    f"{name}: {INDEX_NAME} says it is in {shard}, but it is not; copy that file again"
                )
            elif found[name].shard != shard:
                self._problems.append(
                    f"{name}: {INDEX_NAME} says it is in {shard}, but it is in {found[name].shard}; "
                    "copy the index and the shards from one release"
                )
        for name, entry in found.items():
            if name not in index:
                self._problems.append(
                    f"{name}: in {entry.shard}, but not in {INDEX_NAME}; "
                    "copy the index and the shards from one release"
                )

    def _compare_with_config(
        self,
        found: Mapping[str, _Entry],
        expected: Mapping[str, TensorSpec],
        index: Mapping[str, str],
        unreadable: set[str],
    ) -> None:
        for name, spec in expected.items():
            entry = found.get(name)
            if entry is None:
                # What is in a file that cannot be read, or is named in vain by the index, was reported there.
                if name not in index:
                    self._problems.append(
                        f"{name}: missing from every shard; "
                        f"config.json asks for it, {spec.dtype} {list(spec.shape)}"
                    )
                continue
            if entry.shape != spec.shape:
                self._problems.append(
                    f"{name}: shape {list(entry.shape)} in {entry.shard}, "
                    f"but config.json asks for {list(spec.shape)}; "
                    "use the config.json that belongs to these shards"
                )
            if entry.dtype not in (spec.dtype, spec.also):
                accepted = spec.dtype if spec.also is None else f"{spec.dtype} or {spec.also}"
                self._problems.append(
                    f"{name}: dtype {entry.dtype} in {entry.shard}, but the release format has {accepted}; "
                    "convert the checkpoint from the release again"
                )
        for name, entry in found.items():
            if name not in expected:
                self._problems.append(f"{name}: in {entry.shard}, but nothing uses it; {_why_unused(name)}")


class _BadShard(Exception):
    """What is wrong with a file, without its name, and what to do about it."""

    def __init__(self, problem: str, remedy: str = "copy the file again") -> None:
        super().__init__(f"{problem}; {remedy}")


def _read_header(folder: Path, shard: str) -> dict[str, _Entry]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        _BadShard: They cannot be told, or their bytes are not all there.
    """
    try:
        size = (folder / shard).stat().st_size
        with (folder / shard).open("rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                raise _BadShard(
                    "only a Git LFS pointer to the file", "run git lfs pull in the checkpoint's folder"
                )
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _BadShard(f"no safetensors header ({size} bytes, header length {length})")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise _BadShard(f"missing, though {INDEX_NAME} names it") from None
    except OSError as error:
        raise _BadShard(f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _BadShard(f"its safetensors header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _BadShard("its safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries = {name: _describe(shard, name, item, data_start) for name, item in header.items()}
    for name, entry in entries.items():
        if entry.end > size:
            raise _BadShard(f"truncated: {name} ends at byte {entry.end}, but the file has {size} bytes")
    end, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            relation = "overlaps" if entry.start < end else "leaves a gap after"
            raise _BadShard(f"{name} {relation} {previous} (it starts at byte {entry.start}, not {end})")
        end, previous = entry.end, name
    if end != size:
        raise _BadShard(f"{size - end} bytes follow {previous}, the last tensor")
    return entries


def _describe(shard: str, name: str, item: Any, data_start: int) -> _Entry:
    try:
        dtype, shape = str(item["dtype"]), tuple(int(length) for length in item["shape"])
        start, end = (int(offset) for offset in item["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise _BadShard(f"its header does not describe {name}: {json.dumps(item)[:120]}") from None
    if min(shape, default=0) < 0 or not 0 <= start <= end:
        raise _BadShard(f"its header gives {name} the shape {list(shape)} and bytes {start} to {end}")
    # A dtype we do not know is refused later, beside the one expected; its size need not be known.
    num_bytes = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
    if dtype in DTYPE_BYTES and num_bytes != end - start:
        raise _BadShard(
            f"its header gives {name}, {dtype} {list(shape)}, {end - start} bytes, not {num_bytes}"
        )
    return _Entry(shard, dtype, shape, data_start + start, data_start + end)


def _why_unused(name: str) -> str:
    if re.search(r"\.hc_\w*norm\.weight$", name):
        return "mHC norm weights must be folded into hc_*_fn: convert the checkpoint from the release again"
    if name.startswith("hc_head"):
        return "it belongs to the variant without shifted mHC, which is not supported"
    return "remove it, or use the config.json that belongs to these shards"


def resolve_model_folder(
    model: str, hf_model_dir: str | None = None, download: Callable[[str], str | Path] | None = None
) -> Path:
    """The folder of a checkpoint.

    A folder is itself. A Hugging Face id is ``hf_model_dir`` if that is set, or else what ``download`` makes
    of it.

    Args:
        model: A local folder or a Hugging Face id.
        hf_model_dir: ``DEEPINFER_HF_MODEL_DIR``.
        download: The engine's own way to fetch a repository: from id to local folder.

    Raises:
        FileNotFoundError: There is no such folder, and nothing could be downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    if hf_model_dir is not None:
        if not Path(hf_model_dir).is_dir():
            raise FileNotFoundError(f"DEEPINFER_HF_MODEL_DIR is {hf_model_dir!r}, which is not a folder")
        return Path(hf_model_dir)
    if download is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise FileNotFoundError(
            f"{model!r} is neither a folder nor a Hugging Face id (owner/name); name the checkpoint's "
            "folder, or set DEEPINFER_HF_MODEL_DIR to it"
        )
    try:
        return Path(download(model))
    except Exception as error:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
            raise
        raise FileNotFoundError(
            f"{model} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to download it: unset it, "
            "set DEEPINFER_HF_MODEL_DIR to a folder that has the checkpoint, or run once online"
        ) from error
