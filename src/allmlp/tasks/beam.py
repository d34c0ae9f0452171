"""Beam search: the best sequence a decoder can write, looked for word by word."""

from __future__ import annotations

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.layers.context import Cache
from allmlp.models.encoder_decoder import EncoderDecoderModel


@torch.no_grad()
def search(
    model: EncoderDecoderModel,
    source: Tensor,
    mask: Tensor,
    first: int,
    last: int,
    longest: int,
    banned: Tensor | None = None,
    beam: int = 4,
    alpha: float = 0.6,
) -> list[list[int]]:
    """The best target Y of every source X, without `first` and `last`.

        score(Y) = log p(Y | X) / ((5 + |Y|) / 6)^alpha

    Source: Wu et al., 2016, eq. 14. |Y| counts `last` and is at most `longest`. Words that are `banned` (True, one for
    each of the vocabulary) are never written. beam=1 takes the likeliest word every time.
    """
    if beam < 1 or alpha < 0:
        raise UserError(f"a beam search needs beam >= 1 and alpha >= 0, not {beam} and {alpha:g}")
    if not len(source):
        return []
    beams, cache = Beams(len(source), beam, alpha, last, longest, source.device), Cache()
    memory = model.encode(source, mask).repeat_interleave(beam, dim=0)
    mask = mask.repeat_interleave(beam, dim=0)
    words = source.new_full((len(memory), 1), first)
    while len(words):
        logits = model.decode(words, memory, mask, cache=cache)[:, -1].float()  # (b k) v
        if banned is not None:
            logits = logits.masked_fill(banned, -torch.inf)
        hypotheses, words = beams.extend(logits.log_softmax(dim=-1))
        cache.reorder(hypotheses)
        memory, mask = memory[hypotheses], mask[hypotheses]
    return beams.answers()


class Beams:
    """The hypotheses of several sentences, `beam` of each, and the best that has ended.

    A sentence leaves when `beam` of its hypotheses have ended, or when no other can become better than the best of
    them: log p can only fall, so log p / penalty(longest) is all that one of log p can reach.
    """

    def __init__(
        self, sentences: int, beam: int, alpha: float, last: int, longest: int, device: torch.device | str = "cpu"
    ) -> None:
        self.beam, self.alpha, self.last, self.longest = beam, alpha, last, longest
        self.written = torch.full((sentences, longest), last, device=device)
        """The best ended hypothesis of every sentence, filled up with `last`."""
        # All below is of the sentences that are still open, b first.
        self.open = torch.arange(sentences, device=device)
        self.best = torch.full((sentences,), -torch.inf, device=device)
        self.ended = torch.zeros(sentences, dtype=torch.int64, device=device)
        self.words = torch.empty(sentences, beam, 0, dtype=torch.int64, device=device)  # b k t
        self.scores = torch.full((sentences, beam), -torch.inf, device=device)  # b k, log p
        self.scores[:, 0] = 0  # a sentence begins with one hypothesis, the empty one

    def penalty(self, length: int) -> float:
        return ((5 + length) / 6) ** self.alpha

    def extend(self, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Go on by one word; `chances` are the log p of each after each hypothesis, (b k) v.

        Returns the hypotheses that go on, as numbers of rows of `chances`, and the word that each goes on with, n 1.
        """
        vocabulary = chances.shape[1]
        length = self.words.shape[2] + 1
        totals = self.scores.unsqueeze(2) + chances.view(-1, self.beam, vocabulary)  # b k v
        if length == self.longest:
            totals[:, :, torch.arange(vocabulary, device=totals.device) != self.last] = -torch.inf
        # Twice as many as needed: each hypothesis can end in one way only, so `beam` of them go on.
        scores, places = totals.flatten(1).topk(min(2 * self.beam, self.beam * vocabulary), dim=1)  # b 2k
        parents, words = places // vocabulary, places % vocabulary
        ends = words == self.last
        self.note_ends(torch.where(ends, scores, -torch.inf)[:, : self.beam], parents)
        self.scores, kept = torch.where(ends, -torch.inf, scores).topk(self.beam, dim=1)  # b k
        parents, words = parents.gather(1, kept), words.gather(1, kept)
        before = self.words.gather(1, parents.unsqueeze(2).expand(-1, -1, length - 1))
        self.words = torch.cat([before, words.unsqueeze(2)], dim=2)
        done = (self.ended >= self.beam) | (self.best >= self.scores[:, 0] / self.penalty(self.longest))
        going = ~done if length < self.longest else torch.zeros_like(done)
        hypotheses = parents + self.beam * torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.keep(going)
        return hypotheses[going].flatten(), words[going].view(-1, 1)

    def note_ends(self, scores: Tensor, parents: Tensor) -> None:
        """`scores` are the log p of the hypotheses that end now, b k, and -inf for the others."""
        self.ended += scores.isfinite().sum(dim=1)
        top, place = (scores / self.penalty(self.words.shape[2] + 1)).max(dim=1)
        better = top > self.best
        sentences = torch.arange(len(top), device=top.device)
        words = self.words[sentences, parents[sentences, place]]  # b t
        # Later ones are longer, so nothing of the former best is left.
        self.written[self.open[better], : words.shape[1]] = words[better]
        self.best = torch.where(better, top, self.best)

    def keep(self, sentences: Tensor) -> None:
        self.open, self.best, self.ended = self.open[sentences], self.best[sentences], self.ended[sentences]
        self.words, self.scores = self.words[sentences], self.scores[sentences]

    def answers(self) -> list[list[int]]:
        """The best hypotheses, without `last`."""
        return [row[: row.index(self.last)] if self.last in row else row for row in self.written.tolist()]
