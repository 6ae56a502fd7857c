"""Checks of received models: those of every agent (`admission`), and optional ones (`checks`)."""
