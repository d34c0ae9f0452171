"""Language models on the embedded text, the docstrings of Python's library: minutes on two CPU cores."""

from __future__ import annotations

from allmlp.data.docstrings import Docstrings
from allmlp.layers import TinyAttention
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.models.mixer import mixer_text
from allmlp.models.model import ModelSpec
from allmlp.optim import Muon
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Linear
from allmlp.tasks.causal import CausalLm
from allmlp.tasks.mlm import MaskedLm
from allmlp.tasks.task import Task


def _docstrings(model: ModelSpec, task: Task = MaskedLm()) -> Run:
    return Run(
        model=model,
        task=task,
        data=Docstrings(),
        batch=64,
        budget=Budget(epochs=5),
        optim=Muon(lr=3e-3, decay=0.05),
        schedule=Linear(warmup=0.1),
        clip=1.0,
        cadence=Cadence(log=50, evaluate=250, save=250),
    )


def stdlib_gmlp() -> Run:
    """gMLP, masked language model on the docstrings of Python's library.

    allmlp train stdlib_gmlp
    Two CPU cores, four minutes: perplexity 83.5 on held-out docstrings (one seed).
    """
    return _docstrings(gmlp_text(4, 96, 384, length=64))


def stdlib_amlp() -> Run:
    """aMLP, masked language model on the docstrings of Python's library.

    allmlp train stdlib_amlp
    One CPU core, six minutes: perplexity 82.8 on held-out docstrings (one seed).
    """
    return _docstrings(gmlp_text(4, 96, 384, length=64, side=TinyAttention(32)))


def stdlib_mixer() -> Run:
    """MLP-Mixer, masked language model on the docstrings of Python's library.

    allmlp train stdlib_mixer
    One CPU core, five minutes: perplexity 175 on held-out docstrings (one seed).
    """
    return _docstrings(mixer_text(4, 96, 48, 288))


def stdlib_bert() -> Run:
    """BERT, the baseline, on the docstrings of Python's library.

    allmlp train stdlib_bert
    One CPU core, five minutes: perplexity 245 on held-out docstrings (one seed); it learns slowly at the start.
    """
    return _docstrings(bert(3, 96, 2, length=64))


def stdlib_causal() -> Run:
    """A causal gMLP that writes docstrings.

    allmlp train stdlib_causal
    allmlp generate runs/stdlib_causal --prompt "Return the"
    One CPU core, eight minutes: perplexity 80.4 on held-out docstrings (one seed).
    """
    return _docstrings(gmlp_text(4, 96, 384, length=64, causal=True), CausalLm())
