"""Checkpoints: from an output folder of timm's train.py to a folder to publish, and from there to the Hub."""

from timm_ssog.hub.card import render_card
from timm_ssog.hub.exporting import export
from timm_ssog.hub.pushing import Published, push

__all__ = ["Published", "export", "push", "render_card"]
