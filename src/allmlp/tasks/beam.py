"""Beam search for encoder-decoder models."""

from __future__ import annotations

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.layers.context import Cache
from allmlp.models.encoder_decoder import EncoderDecoderModel
from allmlp.tasks.causal_lm import check_output

MAX_LENGTH_PENALTY = 10.0
"""Larger powers of the length of a text overflow."""


@torch.no_grad()
def beam_search(
    model: EncoderDecoderModel,
    source: Tensor,
    mask: Tensor,
    bos_token_id: int,
    eos_token_id: int,
    max_length: int,
    suppress_tokens: Tensor | None = None,
    num_beams: int = 4,
    length_penalty: float = 0.6,
) -> list[list[int]]:
    """Find the best target Y of every source X; returned without the BOS and EOS tokens.

        score(Y) = log p(Y | X) / ((5 + |Y|) / 6)^length_penalty

    Source: Wu et al., 2016, eq. 14. |Y| includes EOS and is at most `max_length`. `suppress_tokens` is a mask over the
    vocabulary, True for tokens that are never generated. num_beams=1 is greedy search.
    """
    if num_beams < 1 or not 0 <= length_penalty <= MAX_LENGTH_PENALTY:
        raise UserError(
            f"beam search needs num_beams >= 1 and length_penalty from 0 to {MAX_LENGTH_PENALTY:g}, "
            f"not {num_beams} and {length_penalty:g}"
        )
    if not len(source):
        return []
    beams = BeamState(len(source), num_beams, length_penalty, eos_token_id, max_length, source.device)
    cache = Cache()
    memory = model.encode(source, mask).repeat_interleave(num_beams, dim=0)
    mask = mask.repeat_interleave(num_beams, dim=0)
    tokens = source.new_full((len(memory), 1), bos_token_id)
    while len(tokens):
        logits = model.decode(tokens, memory, mask, cache=cache)[:, -1].float()  # (b k) v
        check_output(logits)
        if suppress_tokens is not None:
            logits = logits.masked_fill(suppress_tokens, -torch.inf)
        parents, tokens = beams.advance(logits.log_softmax(dim=-1))
        cache.reorder(parents)
        memory, mask = memory[parents], mask[parents]
    return beams.sequences()


class BeamState:
    """Hypotheses of several sentences, `num_beams` of each, and the best finished one.

    A sentence is done when `num_beams` of its hypotheses are finished, or when no other can beat the best of them:
    log p never increases, so log p / penalty(max_length) bounds the score that a hypothesis can still reach.
    """

    def __init__(
        self,
        sentences: int,
        num_beams: int,
        length_penalty: float,
        eos_token_id: int,
        max_length: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_beams, self.length_penalty = num_beams, length_penalty
        self.eos_token_id, self.max_length = eos_token_id, max_length
        self.finished = torch.full((sentences, max_length), eos_token_id, device=device)
        """Best finished hypothesis of every sentence, padded with EOS."""
        # The tensors below hold only the sentences that are not done, b first.
        self.active = torch.arange(sentences, device=device)
        self.best_score = torch.full((sentences,), -torch.inf, device=device)
        self.num_finished = torch.zeros(sentences, dtype=torch.int64, device=device)
        self.tokens = torch.empty(sentences, num_beams, 0, dtype=torch.int64, device=device)  # b k t
        self.log_probs = torch.full((sentences, num_beams), -torch.inf, device=device)  # b k
        self.log_probs[:, 0] = 0  # the only hypothesis at the start is the empty one

    def penalty(self, length: int) -> float:
        return ((5 + length) / 6) ** self.length_penalty

    def advance(self, next_log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Extend every hypothesis by one token, given log p of each next token, (b k) v.

        Returns the rows of `next_log_probs` whose hypotheses continue, n, and their next tokens, n 1.
        """
        vocab_size = next_log_probs.shape[1]
        length = self.tokens.shape[2] + 1
        totals = self.log_probs.unsqueeze(2) + next_log_probs.view(-1, self.num_beams, vocab_size)  # b k v
        if length == self.max_length:
            totals[:, :, torch.arange(vocab_size, device=totals.device) != self.eos_token_id] = -torch.inf
        # Each hypothesis has one continuation with EOS, so the best 2k candidates hold at least k others.
        log_probs, candidates = totals.flatten(1).topk(min(2 * self.num_beams, self.num_beams * vocab_size), dim=1)
        parents, tokens = candidates // vocab_size, candidates % vocab_size  # b 2k
        ends = tokens == self.eos_token_id
        self.record_finished(torch.where(ends, log_probs, -torch.inf)[:, : self.num_beams], parents)
        self.log_probs, kept = torch.where(ends, -torch.inf, log_probs).topk(self.num_beams, dim=1)  # b k
        parents, tokens = parents.gather(1, kept), tokens.gather(1, kept)
        prefixes = self.tokens.gather(1, parents.unsqueeze(2).expand(-1, -1, length - 1))
        self.tokens = torch.cat([prefixes, tokens.unsqueeze(2)], dim=2)
        bound = self.log_probs[:, 0] / self.penalty(self.max_length)
        done = (self.num_finished >= self.num_beams) | (self.best_score >= bound)
        active = ~done if length < self.max_length else torch.zeros_like(done)
        rows = parents + self.num_beams * torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.keep(active)
        return rows[active].flatten(), tokens[active].view(-1, 1)

    def record_finished(self, log_probs: Tensor, parents: Tensor) -> None:
        """Update the best finished hypotheses; `log_probs`, b k, is -inf for those that do not end now."""
        self.num_finished += log_probs.isfinite().sum(dim=1)
        score, index = (log_probs / self.penalty(self.tokens.shape[2] + 1)).max(dim=1)
        better = score > self.best_score
        sentences = torch.arange(len(score), device=score.device)
        tokens = self.tokens[sentences, parents[sentences, index]]  # b t
        # Later hypotheses are longer, so this overwrites the previous best entirely.
        self.finished[self.active[better], : tokens.shape[1]] = tokens[better]
        self.best_score = torch.where(better, score, self.best_score)

    def keep(self, sentences: Tensor) -> None:
        self.active, self.best_score = self.active[sentences], self.best_score[sentences]
        self.num_finished = self.num_finished[sentences]
        self.tokens, self.log_probs = self.tokens[sentences], self.log_probs[sentences]

    def sequences(self) -> list[list[int]]:
        """Best hypothesis of every sentence, without EOS."""
        eos = self.eos_token_id
        return [row[: row.index(eos)] if eos in row else row for row in self.finished.tolist()]
