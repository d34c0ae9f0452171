"""scikit-learn's embedded digits: no download, a minute or two each on two CPU cores."""

from __future__ import annotations

from allmlp.data.augment import Augment, RandomAffine
from allmlp.data.digits import Digits
from allmlp.layers import TinyAttention
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.model import ModelSpec
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.optim import Muon
from allmlp.run import Budget, Run
from allmlp.spec import override
from allmlp.tasks.classify import Classify


def _digits(model: ModelSpec, lr: float = 1e-2, epochs: int = 24) -> Run:
    return Run(
        # On ARM the gradient of the exact GELU takes eight times as long as that of its tanh form.
        model=override(model.configure(in_chans=1), "block.channel.act", "gelu_tanh"),
        task=Classify(label_smoothing=0.1, augment=Augment((RandomAffine(12.0, 0.1, (0.85, 1.15)),))),
        data=Digits(),
        batch_size=50,
        budget=Budget(epochs=epochs),
        optim=Muon(lr=lr, weight_decay=0.05),
        ema_decay=0.98,
        log_every=50,
        eval_every=150,
        save_every=450,
    )


def digits_mixer() -> Run:
    """MLP-Mixer on the embedded digits.

    allmlp train digits_mixer
    A minute or two on two CPU cores.
    """
    return _digits(mixer(4, 48, patch_size=2, img_size=8, num_classes=10))


def digits_resmlp() -> Run:
    """ResMLP on the embedded digits.

    allmlp train digits_resmlp
    A minute or two on two CPU cores.
    """
    return _digits(resmlp(4, 48, 0.1, patch_size=2, img_size=8, num_classes=10), epochs=36)


def digits_gmlp() -> Run:
    """gMLP on the embedded digits.

    allmlp train digits_gmlp
    A minute or two on two CPU cores.
    """
    return _digits(gmlp(4, 48, patch_size=2, img_size=8, num_classes=10))


def digits_vit() -> Run:
    """ViT, the baseline, on the embedded digits.

    allmlp train digits_vit
    A minute or two on two CPU cores.
    """
    return _digits(vit(4, 64, 4, patch_size=4, img_size=8, num_classes=10), lr=5e-3, epochs=32)


def digits_amlp() -> Run:
    """aMLP on the embedded digits.

    allmlp train digits_amlp
    A minute or two on two CPU cores.
    """
    return _digits(gmlp(4, 48, patch_size=2, img_size=8, num_classes=10, attention=TinyAttention(16, bias=False)))
