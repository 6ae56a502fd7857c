"""Evaluation of models: on test samples, against training alone, and for membership inference."""
