"""HOP-B: the exchange of one chunk of the batch runs while the next chunk's attention computes.

    this stream   attend 0 | attend 1   | attend 2   |          | join, output projection
    beside it              | exchange 0 | exchange 1 | exchange 2

Only steps in which every sequence has the same number of tokens are cut (decode steps). A prefill step has few
sequences and much arithmetic behind each message, so there is little to hide and a second start-up to pay.

The stream beside is entered and left by events, so that a captured graph holds the same fork and join. All ranks issue
their collectives from one thread in the same order, whatever stream they go to. On a CPU there is no stream: chunks
follow each other, with the same results.

Letters: T tokens, S sequences, R page rows, H query heads, h heads after the exchange, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function


@dataclass(frozen=True, slots=True)
class Overlap:
    """In how many chunks a step's attention runs, and the stream that carries the exchanges; 1 is the lockstep order.

    Without a stream (on a CPU) nothing is hidden.
    """

    num_chunks: int = 1
    stream: torch.cuda.Stream | None = None


LOCKSTEP = Overlap()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a step's sequences as `attend` reads them; `tokens` says where theirs lie in the step."""

    index: int
    tokens: slice
    page_table_SR: Tensor
    query_start_S1: Tensor
    visible_len_T: Tensor

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `attend` that say which slots each token sees."""
        return self.page_table_SR, self.query_start_S1, self.visible_len_T


class ChunkExchange(Protocol):
    """Partial outputs [T, H, D] and lse [T, H] of one chunk -> its merged outputs [T, h, D]."""

    def __call__(self, out_THD: Tensor, lse_TH: Tensor, *, chunk: int) -> Tensor: ...


def cut(num_chunks: int, page_table_SR: Tensor, query_start_S1: Tensor, visible_len_T: Tensor) -> tuple[Chunk, ...]:
    """The step in at most `num_chunks` runs of sequences whose sizes differ by one at most; views, no copies.

    Raises: ValueError where there would be more than one and the sequences cannot all have as many tokens.
    """
    num_sequences, num_tokens = page_table_SR.shape[0], visible_len_T.shape[0]
    count = min(num_chunks, num_sequences)
    if count <= 1:
        return (Chunk(0, slice(0, num_tokens), page_table_SR, query_start_S1, visible_len_T),)
    each, rest = divmod(num_tokens, num_sequences)
    if rest:
        raise ValueError(f"{num_tokens} tokens of {num_sequences} sequences cannot be cut into {count} equal chunks")
    cuts = [num_sequences * index // count for index in range(count + 1)]
    chunks = []
    for index in range(count):
        first, last = cuts[index], cuts[index + 1]
        tokens = slice(first * each, last * each)
        # Equal counts: the first tokens of any run of sequences lie like those of the step's first ones.
        start_S1 = query_start_S1[: last - first + 1]
        chunks.append(Chunk(index, tokens, page_table_SR[first:last], start_S1, visible_len_T[tokens]))
    return tuple(chunks)


def attend_and_exchange(
    chunks: tuple[Chunk, ...],
    stream: torch.cuda.Stream | None,
    attend: Callable[[Chunk], tuple[Tensor, Tensor]],
    exchange: ChunkExchange,
) -> Tensor:
    """Attention of each chunk here and its exchange on `stream`; merged outputs [T, h, D] of all chunks in order.

    `attend` gives a chunk's partial outputs and lse. On return the current stream waits for all exchanges.
    """
    beside = stream if len(chunks) > 1 else None
    # Partial results are read on the other stream; kept until the join, their memory is not given out again before.
    partials, outs = [], []
    for chunk in chunks:
        with record_function(f"attention chunk {chunk.index}"):
            partials.append(attend(chunk))
        if beside is not None:
            beside.wait_stream(torch.cuda.current_stream(beside.device))
        with torch.cuda.stream(beside), record_function(f"exchange chunk {chunk.index}"):
            outs.append(exchange(*partials[-1], chunk=chunk.index))
    if beside is not None:
        torch.cuda.current_stream(beside.device).wait_stream(beside)
    return outs[0] if len(outs) == 1 else torch.cat(outs)
