"""Token files -> training windows, in an order that is a pure function of seed and step."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from groundlm.data.integrity import verify_files
from groundlm.data.manifest import Manifest, SplitInfo
from groundlm.data.steps import INDEX_BYTES, id_type
from groundlm.errors import UserError

CHUNK_TOKENS = 2**22
# Document ends per file whose token is looked at on opening: all of a small file's, and enough of
# a large one's to recognise tokens of another tokenizer or order.
ENDS_CHECKED = 1024
SEEDS = 2**32  # RandomState takes no larger seed


class TokenSplit:
    """One split of prepared token data: its files as one sequence of ids, read from disk."""

    def __init__(self, folder: Path, manifest: Manifest, info: SplitInfo) -> None:
        self.folder = folder
        self.manifest = manifest
        self.info = info
        self.dtype = id_type(manifest.vocab_size)
        self._starts = np.cumsum([0] + [file.tokens for file in info.files], dtype=np.int64)
        self._files = [self._map(index) for index in range(len(info.files))]
        self.document_ends = np.concatenate(
            [start + self._index(index) for index, start in enumerate(self._starts[:-1])]
        )
        """Position after each document's EOS, int64 [documents], ascending."""

    @classmethod
    def open(cls, data_dir: str | Path, split: str) -> "TokenSplit":
        """Open `<data_dir>/<split>` and hold its files against the manifest.

        Raises UserError naming the folder, split or file that is missing, of another size or
        content than the manifest says, or whose document ends are not ascending, do not end at the
        token count or are not at EOS tokens (as in a file of another tokenizer).
        """
        manifest = Manifest.load(data_dir)
        if split not in manifest.splits:
            raise UserError(
                f"token data '{data_dir}' has no split '{split}', only {', '.join(manifest.splits)}"
            )
        if manifest.dtype != id_type(manifest.vocab_size).name:
            raise UserError(
                f"token data '{data_dir}': ids of {manifest.vocab_size:,} entries are not stored "
                f"as {manifest.dtype}"
            )
        found = cls(Path(data_dir) / split, manifest, manifest.splits[split])
        try:
            verify_files(found.folder, found.info.files)
        except UserError:
            found.unigram_counts()  # names an id outside the vocabulary, if that is what is wrong
            raise
        return found

    @property
    def tokens(self) -> int:
        """Number of tokens, one EOS per document included."""
        return int(self._starts[-1])

    @property
    def documents(self) -> int:
        return len(self.document_ends)

    @property
    def utf8_bytes(self) -> int:
        """Bytes of the documents' text in UTF-8; EOS tokens have none."""
        return self.info.utf8_bytes

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def eos_token_id(self) -> int:
        return self.manifest.tokenizer.eos_token_id

    def _map(self, index: int) -> np.ndarray:
        file = self.info.files[index]
        path = self.folder / file.name
        expected_bytes = file.tokens * self.dtype.itemsize
        for part, size_bytes in (
            (path, expected_bytes),
            (path.with_name(f"{path.name}.index"), file.documents * INDEX_BYTES),
        ):
            try:
                found_bytes = part.stat().st_size
            except OSError as error:
                raise UserError(f"token file '{part}' cannot be read: {error.strerror}") from error
            if found_bytes != size_bytes:
                raise UserError(
                    f"token file '{part}' has {found_bytes:,} bytes, not the {size_bytes:,} of "
                    "the manifest"
                )
        if not file.tokens:
            raise UserError(f"token file '{path}' is empty")
        return np.memmap(path, dtype=self.dtype, mode="r")

    def _index(self, index: int) -> np.ndarray:
        """Document ends of one file, int64, checked."""
        file = self.info.files[index]
        path = self.folder / f"{file.name}.index"
        ends = np.fromfile(path, dtype="<u8").astype(np.int64)
        if not len(ends) or ends[-1] != file.tokens:
            last = ends[-1] if len(ends) else 0
            raise UserError(f"'{path}' ends at token {last:,}, its file at {file.tokens:,}")
        if ends[0] <= 0 or (np.diff(ends) <= 0).any():
            raise UserError(f"'{path}': document ends are not ascending")
        picked = ends[np.linspace(0, len(ends) - 1, min(len(ends), ENDS_CHECKED)).astype(np.int64)]
        wrong = np.flatnonzero(self._files[index][picked - 1] != self.eos_token_id)
        if len(wrong):
            offset = int(picked[wrong[0]]) - 1
            raise UserError(
                f"'{self.folder / file.name}': token {offset:,} ends a document but has id "
                f"{self._files[index][offset]}, not the EOS id {self.eos_token_id}: not the file "
                "that was made with this manifest"
            )
        return ends

    def read(self, start: int, length: int) -> np.ndarray:
        """Ids [start, start + length) as int64 [length], across files.

        Raises ValueError outside the split, UserError for an id outside the vocabulary.
        """
        end = start + length
        if start < 0 or length < 0 or end > self.tokens:
            raise ValueError(f"tokens [{start}, {end}) of a split of {self.tokens}")
        ids = np.empty(length, dtype=np.int64)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        for index in range(first, len(self._files)):
            if done == length:
                break
            offset = start + done - int(self._starts[index])
            part = self._files[index][offset : offset + length - done]
            self._check_ids(part, index, offset)
            ids[done : done + len(part)] = part
            done += len(part)
        return ids

    def _check_ids(self, ids: np.ndarray, index: int, offset: int) -> None:
        if ids.max(initial=0) >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise UserError(
                f"token file '{self.folder / self.info.files[index].name}' has id {ids[at]} at "
                f"token {offset + at:,} (byte {(offset + at) * self.dtype.itemsize:,}), outside "
                f"the vocabulary of {self.vocab_size:,}"
            )

    def unigram_counts(self) -> np.ndarray:
        """Occurrences of each id in the split, int64 [vocab_size]."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, self.tokens, CHUNK_TOKENS):
            ids = self.read(start, min(CHUNK_TOKENS, self.tokens - start))
            counts += np.bincount(ids, minlength=self.vocab_size)
        return counts


class TrainingWindows:
    """Windows of T inputs and T next-token targets, each once an epoch, epochs without end.

    Window w covers tokens [w*T, w*T + T], so neighbours share one token and every token but the
    split's first is a target once (the last tokens that fill no window are left out). Sample
    g = step * batch_size + row is window permutation_e[g mod num_windows] of epoch
    e = g // num_windows; batches run across the ends of epochs. The permutation comes from NumPy's
    legacy RandomState([seed, e]), whose stream, unlike Generator's, is frozen for ever.
    """

    def __init__(self, split: TokenSplit, window_tokens: int, batch_size: int, seed: int) -> None:
        """Raises UserError if the split does not fill one window, or for values out of range."""
        if window_tokens < 1 or batch_size < 1 or not 0 <= seed < SEEDS:
            raise UserError(
                f"window of {window_tokens} tokens, batch of {batch_size}, seed {seed}: the first "
                f"two must be at least 1, the seed in [0, {SEEDS})"
            )
        self.split = split
        self.window_tokens = window_tokens
        self.batch_size = batch_size
        self.seed = seed
        self.num_windows = (split.tokens - 1) // window_tokens
        if self.num_windows == 0:
            raise UserError(
                f"'{split.folder}' has {split.tokens:,} tokens: a window of {window_tokens:,} "
                f"needs {window_tokens + 1:,}"
            )
        self._permutations: dict[int, np.ndarray] = {}

    @cached_property
    def batch_tokens(self) -> int:
        """Target tokens of one batch."""
        return self.window_tokens * self.batch_size

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, targets) of a step, int64 [batch_size, T], contiguous."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [first, first + count) of a step's batch, int64 [count, T], contiguous."""
        if step < 0 or first < 0 or count < 0 or first + count > self.batch_size:
            raise ValueError(
                f"rows [{first}, {first + count}) of step {step}, batch of {self.batch_size}"
            )
        tokens = np.empty((count, self.window_tokens + 1), dtype=np.int64)
        for row in range(count):
            window = self.window_at(step * self.batch_size + first + row)
            tokens[row] = self.split.read(window * self.window_tokens, self.window_tokens + 1)
        ids = torch.from_numpy(tokens)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def window_at(self, sample: int) -> int:
        """The window that is sample number `sample` of the whole training."""
        epoch, place = divmod(sample, self.num_windows)
        return int(self._permutation(epoch)[place])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # A batch may lie across two epochs; older ones are not met again.
            kept = {e: p for e, p in self._permutations.items() if e in (epoch - 1, epoch + 1)}
            random = np.random.RandomState([self.seed, epoch])
            self._permutations = {**kept, epoch: random.permutation(self.num_windows)}
            while len(self._permutations) > 2:
                del self._permutations[min(self._permutations)]
        return self._permutations[epoch]


class StreamWindows(TrainingWindows):
    """Windows of which each row of the batch reads its own stretch of the split in order.

    Row r of step s continues row r of step s - 1, so a state can be carried from one to the next;
    where `restarts(s)`, all rows begin a new stretch. With L = num_windows // batch_size, epoch
    e = s // L gives row r the L windows from offset_e + ((r + shift_e) mod batch_size) * L, offset
    and shift drawn from RandomState([seed, e]).
    """

    def __init__(self, split: TokenSplit, window_tokens: int, batch_size: int, seed: int) -> None:
        """Raises UserError if the split does not fill one window for each row."""
        super().__init__(split, window_tokens, batch_size, seed)
        self.stretch_windows = self.num_windows // batch_size
        if self.stretch_windows == 0:
            raise UserError(
                f"'{split.folder}' has {self.num_windows:,} windows of {window_tokens:,} tokens: "
                f"carrying a state needs one for each of {batch_size:,} rows"
            )

    def restarts(self, step: int) -> bool:
        """Whether the rows of this step do not continue those of the step before."""
        return step % self.stretch_windows == 0

    def window_at(self, sample: int) -> int:
        step, row = divmod(sample, self.batch_size)
        epoch, place = divmod(step, self.stretch_windows)
        random = np.random.RandomState([self.seed, epoch])
        shift = random.randint(self.batch_size)
        offset = random.randint(self.num_windows - self.stretch_windows * self.batch_size + 1)
        return offset + (row + shift) % self.batch_size * self.stretch_windows + place
