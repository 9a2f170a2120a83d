"""Pictures of environments: `render(env, state, timestep)` is a frame. Read drawings.py first.

Drawings are kept apart from the rules: an environment knows nothing of them.
"""

from torchpod.render.canvas import Canvas
from torchpod.render.drawings import DRAWINGS, Drawing, describe, drawing_of, frame_size, render

__all__ = ["DRAWINGS", "Canvas", "Drawing", "describe", "drawing_of", "frame_size", "render"]
