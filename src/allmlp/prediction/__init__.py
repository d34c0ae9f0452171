"""Prediction and embedding with trained models: images and texts, one or millions."""

from __future__ import annotations

from allmlp.prediction.answers import Prediction, check_classes, most_probable
from allmlp.prediction.predictor import ImagePredictor, Predictor, TextPredictor, generate, inputs_of, open_predictor

__all__ = [
    "ImagePredictor",
    "Prediction",
    "Predictor",
    "TextPredictor",
    "check_classes",
    "generate",
    "inputs_of",
    "most_probable",
    "open_predictor",
]
